"""Units of a model gather their groups around their forwards, and leave them however those end."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload.tiers.errors import UnsupportedError
from offload.zero.groups.discovery import GroupPlan, discover
from offload.zero.groups.group import Classes, GroupState, ParamGroup
from offload.zero.groups.layout import lay_out
from offload.zero.hooks.handles import HandleTable
from offload.zero.hooks.one_thread import OneThread
from offload.zero.hooks.unit_hooks import UnitHooks
from tests.swap.state_conformance import Places, make_places

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.on_call: Callable[[Block], None] = lambda block: None

    def forward(self, x: Tensor) -> Tensor:
        self.on_call(self)
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


class Hooked:
    """A model with hooks: parameters at home in files, nothing else of a runtime."""

    def __init__(self, places: Places) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.plain = copy.deepcopy(self.model)
        self.used: list[str] = []  # groups, in the order in which they were asked for
        self.written: list[tuple[str, list[int]]] = []
        self.forwards = 0
        found = discover(self.model)
        self.groups = [self._group(places, index, plan) for index, plan in enumerate(found.groups)]
        self.by_name = {group.name: group for group in self.groups}
        self.hooks = UnitHooks(
            self.model, found.units, self.groups, HandleTable(self._use), self._use,
            lambda group, indices: self.written.append((group.name, indices)),
            self._begin_forward, self, OneThread(),
        )  # fmt: skip

    def _group(self, places: Places, index: int, plan: GroupPlan) -> ParamGroup:
        name, layout = plan.name, lay_out(plan.shape.params)
        by_names = dict(plan.params)
        ordered = [by_names[spec.names] for spec in layout.params]
        state = places.in_file(name or "rest", layout.numel * 4)
        flat = state.blank().view(torch.float32)
        for param, spec in zip(ordered, layout.params, strict=True):
            flat[spec.offset : spec.stop] = param.detach().reshape(-1)
        del flat
        state.mark_dirty()
        group = ParamGroup(
            index, name, layout, ordered, torch.float32, state, CPU,
            lambda kind: Classes(kind, kind, kind),
        )  # fmt: skip
        group.adopt()
        return group

    def _use(self, group: ParamGroup) -> None:
        self.used.append(group.name)

    def _begin_forward(self) -> None:
        self.forwards += 1

    def gathered(self) -> list[str]:
        return [group.name for group in self.groups if group.residing is GroupState.GATHERED]

    def assert_at_rest(self) -> None:
        assert self.gathered() == []
        assert not any(group.is_entered for group in self.groups)
        assert not self.hooks.join_call([]), "no call is under way"

    def assert_trains(self, x: Tensor) -> None:
        """As the model without hooks: outputs and gradients, bit for bit."""
        for model in (self.model, self.plain):
            model.zero_grad()
            model(x).square().sum().backward()
        for param, expected in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert param.grad is not None
            assert torch.equal(param.grad, expected.grad)
        self.assert_at_rest()


@pytest.fixture
def hooked(tmp_path: Path) -> Iterator[Hooked]:
    for places in make_places(tmp_path):
        found = Hooked(places)
        yield found
        found.hooks.remove()
        for group in found.groups:
            group.state.close()


X = torch.linspace(-1, 1, 16).view(2, 8)


def test_a_group_is_gathered_while_its_unit_computes_and_not_after(hooked: Hooked) -> None:
    seen: list[list[str]] = []
    for block in hooked.model.blocks:
        block.on_call = lambda block: seen.append(hooked.gathered())
    with torch.no_grad():
        assert torch.equal(hooked.model(X), hooked.plain(X))
    (rest,) = set(hooked.by_name) - {f"blocks.{n}" for n in range(3)}
    assert [sorted(each) for each in seen] == [
        sorted([f"blocks.{number}", rest]) for number in range(3)
    ]
    assert hooked.used == [rest, "blocks.0", "blocks.1", "blocks.2"]
    hooked.assert_at_rest()


def test_backward_asks_for_the_groups_again_in_the_reverse_order(hooked: Hooked) -> None:
    loss = hooked.model(X.clone().requires_grad_()).sum()
    hooked.used.clear()
    loss.backward()
    blocks = [name for name in dict.fromkeys(hooked.used) if name.startswith("blocks")]
    assert blocks == ["blocks.2", "blocks.1", "blocks.0"]
    hooked.assert_trains(X)


def test_a_whole_forward_is_told_once_and_a_call_of_a_part_is_none(hooked: Hooked) -> None:
    hooked.model(X)
    assert hooked.forwards == 1
    hooked.model.blocks[1](X)
    assert hooked.forwards == 1
    hooked.assert_at_rest()


@pytest.mark.parametrize("error", [RuntimeError("amid"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("where", ["forward", "pre-hook", "hook"])
def test_a_call_that_ends_badly_gives_back_what_it_entered(
    hooked: Hooked, error: BaseException, where: str
) -> None:
    block = hooked.model.blocks[1]

    def fail(*_: Any) -> None:
        raise error

    if where == "forward":
        block.on_call = fail
    elif where == "pre-hook":
        handle = block.register_forward_pre_hook(fail)
    else:
        handle = block.register_forward_hook(fail)
    with pytest.raises(type(error)):
        hooked.model(X)
    hooked.assert_at_rest()
    if where == "forward":
        block.on_call = lambda block: None
    else:
        handle.remove()
    hooked.assert_trains(X)


def test_what_a_forward_writes_to_its_parameters_is_told(hooked: Hooked) -> None:
    def write(block: Block) -> None:
        with torch.no_grad():
            block.inner.bias.add_(1)

    hooked.model.blocks[2].on_call = write
    with torch.no_grad():
        hooked.model(X)
    group = hooked.by_name["blocks.2"]
    names = [group.layout.params[index].name for _, found in hooked.written for index in found]
    assert [name for name, _ in hooked.written] == ["blocks.2"]
    assert names == ["blocks.2.inner.bias"]


def test_what_is_held_stays_gathered_through_forwards(hooked: Hooked) -> None:
    group = hooked.by_name["blocks.0"]
    with hooked.hooks.held([group]):
        with torch.no_grad():
            hooked.model(X)
        assert hooked.gathered() == ["blocks.0"]
        assert torch.equal(hooked.model.blocks[0].inner.bias, hooked.plain.blocks[0].inner.bias)
    hooked.assert_at_rest()


def test_a_group_that_joins_a_call_stays_until_its_end(hooked: Hooked) -> None:
    group, seen = hooked.by_name["blocks.2"], []
    hooked.model.blocks[0].on_call = lambda block: seen.append(hooked.hooks.join_call([group]))
    hooked.model.blocks[1].on_call = lambda block: seen.append("blocks.2" in hooked.gathered())
    hooked.model(X)
    assert seen == [True, True]
    hooked.assert_at_rest()


def test_a_unit_may_be_computed_without_being_called(hooked: Hooked) -> None:
    unit = next(unit for unit in discover(hooked.plain).units if unit.name == "blocks.1")
    unit.module = hooked.model.blocks[1]
    with hooked.hooks.computing(unit), torch.no_grad():
        assert "blocks.1" in hooked.gathered()
        found = hooked.model.blocks[1].forward(X)
        assert torch.equal(found, hooked.plain.blocks[1](X))
    hooked.assert_at_rest()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_hooked_model_cannot_be_copied(
    hooked: Hooked, duplicate: Callable[[nn.Module], object]
) -> None:
    for block in hooked.model.blocks:
        del block.on_call  # a function of the test, which cannot be pickled
    for group in hooked.groups:
        group.gather()  # these parameters have no class that fetches their values
    with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
        duplicate(hooked.model)


def test_removed_hooks_leave_the_modules_as_they_were(hooked: Hooked) -> None:
    assert UnitHooks.has_an_engine(hooked.model)
    hooked.hooks.remove()
    assert not any(UnitHooks.has_an_engine(module) for module in hooked.model.modules())
    for module, plain in zip(hooked.model.modules(), hooked.plain.modules(), strict=True):
        assert module._forward_pre_hooks == plain._forward_pre_hooks
        assert module._forward_hooks == plain._forward_hooks
        assert module._compiled_call_impl is None
    hooked.used.clear()
    with pytest.raises(UnsupportedError, match="over a parameter's placeholder"):
        hooked.model(X)
    assert hooked.used == []
