"""Views of a home on the device are made once, and kept until the group is closed."""

from typing import Any

import pytest
import torch
from torch import nn

from offload.tiers.errors import UnsupportedError
from offload.zero.groups.fetching import Fetcher
from offload.zero.groups.group import Classes, ParamGroup
from offload.zero.groups.layout import ParamShape, lay_out


class Home:
    """A home that gives one object out, or a new one each time."""

    in_place = True

    def __init__(self, nbytes: int, *, on_device: bool) -> None:
        self.at_home_on_device = on_device
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8)
        self.brought = 0

    def tensor(self) -> torch.Tensor:
        return self.bytes if self.at_home_on_device else self.bytes[:]

    def note_use(self) -> None:
        """It is not counted."""

    def prefetch(self, **_: Any) -> bool:
        self.brought += 1
        return True

    @property
    def uses(self) -> int:
        return int(torch._C._storage_Use_Count(self.bytes.untyped_storage()._cdata))


def group_over(*, on_device: bool) -> tuple[ParamGroup, Home]:
    layout = lay_out([ParamShape(("a",), (2, 3)), ParamShape(("b",), (4,))])
    params = [nn.Parameter(torch.zeros(spec.shape)) for spec in layout.params]
    home: Any = Home(layout.numel * 4, on_device=on_device)
    group = ParamGroup(
        0, "group", layout, params, torch.float32, home, torch.device("cpu"),
        lambda kind: Classes(kind, kind, kind),
    )  # fmt: skip
    group.adopt()
    return group, home


def test_a_group_that_was_withheld_shows_its_home_again() -> None:
    group, home = group_over(on_device=True)
    flat = group.flat()
    group.unmap()
    with pytest.raises(UnsupportedError, match=r"placeholder, \(2, 3\)"):
        group.params[0].isnan()
    home.bytes.view(torch.float32).copy_(torch.arange(float(flat.numel())))
    group.gather()
    assert group.flat() is flat
    for param, spec in zip(group.params, group.layout.params, strict=True):
        assert torch.equal(param.flatten(), torch.arange(float(spec.offset), float(spec.stop)))


def test_another_buffer_gets_views_of_its_own() -> None:
    group, home = group_over(on_device=True)
    group.unmap()
    home.bytes = torch.zeros_like(home.bytes)
    home.bytes.view(torch.float32).fill_(5.0)
    group.gather()
    assert all((param == 5.0).all() for param in group.params)


def test_a_closed_group_and_one_in_host_memory_keep_no_view() -> None:
    group, home = group_over(on_device=True)
    group.close()
    alone = home.uses
    group, other = group_over(on_device=False)
    group.unmap()
    assert other.uses == alone


def test_nothing_is_fetched_ahead_where_nothing_moves() -> None:
    group, home = group_over(on_device=True)
    fetcher = Fetcher(depth=2)
    fetcher.add(group)
    for _ in range(2):
        fetcher.need(group)
        fetcher.trace.end_cycle()
    asked = home.brought
    fetcher.fetch_ahead()
    assert home.brought == asked
    home.in_place = False
    moving = Fetcher(depth=2)
    moving.add(group)
    moving.need(group)
    moving.trace.end_cycle()
    moving.fetch_ahead()
    assert home.brought == asked + 2
