"""Two parameters over one memory are refused by name; what only lies side by side is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import offload
from offload.errors import UnsupportedError
from offload.weights.lazy_tensors import lazy_tensors
from tests.offload.engine_cases import MARKS, NVME, ON, config

pytestmark = MARKS


class Two(nn.Module):
    """`base` has room for both weights and is in none of them."""

    def __init__(self, change: Callable[[Two], None], base: torch.Tensor | None = None) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)
        self.base = [torch.randn(16, 8) if base is None else base]
        change(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x))
        return y


def same(model: Two) -> None:
    model.b.weight = nn.Parameter(model.a.weight.data)


def same_by_data(model: Two) -> None:
    model.b.weight.data = model.a.weight.data


def frozen(model: Two) -> None:
    model.b.weight = nn.Parameter(model.a.weight.data, requires_grad=False)


def part_by_data(model: Two) -> None:
    model.b.weight.data = model.a.weight.data[2:]


def transposed(model: Two) -> None:
    model.b.weight = nn.Parameter(model.a.weight.data.t())


def one_row(model: Two) -> None:
    (base,) = model.base
    model.a.weight, model.b.weight = nn.Parameter(base[:8]), nn.Parameter(base[7:15])


def by_numpy(model: Two) -> None:
    array = model.a.weight.detach().numpy()
    model.b.weight = nn.Parameter(torch.from_numpy(array))


def lazily(change: Callable[[Two], None], folder: Path) -> Two:
    """The same model, whose weights are still in a file."""
    ordinary = Two(lambda model: None)
    values = {"a": ordinary.a.weight, "b": ordinary.b.weight, "base": ordinary.base[0]}
    save_file({name: value.detach() for name, value in values.items()}, folder / "in.safetensors")
    lazy = lazy_tensors([folder / "in.safetensors"])

    def lazy_weights(model: Two) -> None:
        model.a.weight, model.b.weight = nn.Parameter(lazy["a"]), nn.Parameter(lazy["b"])
        change(model)

    return Two(lazy_weights, lazy["base"])


def on_meta(change: Callable[[Two], None], folder: Path) -> Two:
    with torch.device("meta"):
        return Two(change)


def in_ram(change: Callable[[Two], None], folder: Path) -> Two:
    return Two(change)


MAKES = [in_ram, lazily, on_meta]
SHARED = [same, same_by_data, part_by_data, frozen, transposed, one_row]
MESSAGE = r"a\.weight and b\.weight have the same memory.*one object"


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("change", SHARED)
def test_two_parameters_over_one_memory_are_refused_by_name(
    tmp_path: Path, change: Callable[[Two], None], make: Any
) -> None:
    with pytest.raises(UnsupportedError, match=MESSAGE):
        offload.initialize(make(change, tmp_path), config(tmp_path))


def other_memory(model: Two) -> None:
    model.a.weight.data = torch.ones(8, 8)
    model.b.weight.data = model.a.weight.data[:]


def one_ordinary(model: Two) -> None:
    model.a.weight.data = model.b.weight.data = torch.ones(8, 8)


def an_ordinary_parameter(model: Two) -> None:
    ordinary = torch.ones(8, 8)
    model.a.weight.data = ordinary
    model.c = nn.Parameter(ordinary)


@pytest.mark.parametrize("change", [other_memory, one_ordinary, an_ordinary_parameter])
def test_lazy_weights_share_memory_where_ordinary_ones_would(
    tmp_path: Path, change: Callable[[Two], None]
) -> None:
    for make in (in_ram, lazily):
        with pytest.raises(UnsupportedError, match="have the same memory"):
            offload.initialize(make(change, tmp_path), config(tmp_path))


def test_an_array_over_a_parameters_memory_is_found(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=MESSAGE):
        offload.initialize(Two(by_numpy), config(tmp_path))


def view_as_buffer(model: Two) -> None:
    model.register_buffer("first", model.a.weight.data[0])


def frozen_with_a_buffer(model: Two) -> None:
    model.a.weight.requires_grad_(False)
    view_as_buffer(model)


FROZEN = [(make, frozen_with_a_buffer) for make in (in_ram, on_meta)]


@pytest.mark.parametrize(("make", "change"), [(make, view_as_buffer) for make in MAKES] + FROZEN)
def test_a_buffer_over_a_parameter_is_refused_by_name(
    tmp_path: Path, make: Any, change: Callable[[Two], None]
) -> None:
    with pytest.raises(UnsupportedError, match=r"(first|weight) and .* have the same memory"):
        offload.initialize(make(change, tmp_path), config(tmp_path))


def test_buffers_over_one_memory_on_the_meta_device_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"first and second have the same memory"):
        offload.initialize(on_meta(tied_buffers, tmp_path), config(tmp_path))


def halves(model: Two) -> None:
    (base,) = model.base
    model.a.weight, model.b.weight = nn.Parameter(base[:8]), nn.Parameter(base[8:])


def tied(model: Two) -> None:
    model.b.weight = model.a.weight


def copied(model: Two) -> None:
    same_by_data(model)
    model.a, model.b = copy.deepcopy(nn.ModuleList([model.a, model.b]))  # parts memory: torch's way


def tied_buffers(model: Two) -> None:
    (base,) = model.base
    model.register_buffer("first", base[:8])
    model.register_buffer("second", base[:8])


@pytest.mark.parametrize("make", [in_ram, lazily])
@pytest.mark.parametrize("change", [halves, tied, copied, tied_buffers])
def test_what_is_apart_or_one_object_trains(
    tmp_path: Path, change: Callable[[Two], None], make: Any
) -> None:
    torch.manual_seed(0)
    plain = Two(change)
    torch.manual_seed(0)
    model = make(change, tmp_path)
    x = torch.randn(4, 8)
    expected = plain(x)
    with offload.initialize(model, config(tmp_path, NVME)) as engine:
        actual = model(x.to(ON))
        torch.testing.assert_close(actual.cpu(), expected)  # of strided weights in another order
        actual.sum().backward()
        engine.optimizer.step()
        if change is tied_buffers and make is in_ram:
            model.first.zero_()
            assert model.second.eq(0).all()
