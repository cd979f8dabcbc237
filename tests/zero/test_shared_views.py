"""Two parameters over one memory are refused by name; what only lies side by side is not."""

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

Change = Callable[["Two"], None]
Make = Callable[[Change, Path], "Two"]


class Two(nn.Module):
    """`base` has room for both weights and is in none of them."""

    def __init__(self, change: Change, base: torch.Tensor | None = None) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)
        self.base = [torch.randn(16, 8) if base is None else base]
        change(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def weight_of_b(source: Callable[[nn.Parameter], Any], *, data: bool = False) -> Change:
    """The weight of `b`, or its `.data`, is made of that of `a`."""

    def change(model: Two) -> None:
        if data:
            model.b.weight.data = source(model.a.weight)
        else:
            model.b.weight = source(model.a.weight)

    return change


def one_row(model: Two) -> None:
    (base,) = model.base
    model.a.weight, model.b.weight = nn.Parameter(base[:8]), nn.Parameter(base[7:15])


def lazily(change: Change, folder: Path) -> Two:
    """The same model, whose weights are still in a file."""
    ordinary = Two(lambda model: None)
    values = {"a": ordinary.a.weight, "b": ordinary.b.weight, "base": ordinary.base[0]}
    save_file({name: value.detach() for name, value in values.items()}, folder / "in.safetensors")
    lazy = lazy_tensors([folder / "in.safetensors"])

    def lazy_weights(model: Two) -> None:
        model.a.weight, model.b.weight = nn.Parameter(lazy["a"]), nn.Parameter(lazy["b"])
        change(model)

    return Two(lazy_weights, lazy["base"])


def on_meta(change: Change, folder: Path) -> Two:
    with torch.device("meta"):
        return Two(change)


def in_ram(change: Change, folder: Path) -> Two:
    return Two(change)


def other_memory(model: Two) -> None:
    model.a.weight.data = torch.ones(8, 8)
    model.b.weight.data = model.a.weight.data[:]


def one_ordinary(model: Two) -> None:
    model.a.weight.data = model.b.weight.data = torch.ones(8, 8)


def an_ordinary_parameter(model: Two) -> None:
    ordinary = torch.ones(8, 8)
    model.a.weight.data = ordinary
    model.c = nn.Parameter(ordinary)


def view_as_buffer(model: Two) -> None:
    model.register_buffer("first", model.a.weight.data[0])


def frozen_with_a_buffer(model: Two) -> None:
    model.a.weight.requires_grad_(False)
    view_as_buffer(model)


def tied_buffers(model: Two) -> None:
    (base,) = model.base
    model.register_buffer("first", base[:8])
    model.register_buffer("second", base[:8])


MAKES: list[Make] = [in_ram, lazily, on_meta]
same_data = weight_of_b(lambda a: a.data, data=True)
BOTH = r"a\.weight and b\.weight have the same memory.*one object"
BUFFER = r"(first|weight) and .* have the same memory"
SHARED: dict[str, tuple[Change, str, list[Make]]] = {
    "a parameter of it": (weight_of_b(lambda a: nn.Parameter(a.data)), BOTH, MAKES),
    "a frozen one": (weight_of_b(lambda a: nn.Parameter(a.data, False)), BOTH, MAKES),
    "transposed": (weight_of_b(lambda a: nn.Parameter(a.data.t())), BOTH, MAKES),
    "data": (same_data, BOTH, MAKES),
    "part of data": (weight_of_b(lambda a: a.data[2:], data=True), BOTH, MAKES),
    "one row": (one_row, BOTH, MAKES),
    "an array": (
        weight_of_b(lambda a: nn.Parameter(torch.from_numpy(a.detach().numpy()))), BOTH, [in_ram],
    ),
    "other memory": (other_memory, "have the same memory", [in_ram, lazily]),
    "one ordinary": (one_ordinary, "have the same memory", [in_ram, lazily]),
    "another parameter": (an_ordinary_parameter, "have the same memory", [in_ram, lazily]),
    "a buffer": (view_as_buffer, BUFFER, MAKES),
    "a buffer of a frozen one": (frozen_with_a_buffer, BUFFER, [in_ram, on_meta]),
    "two buffers": (tied_buffers, "first and second have the same memory", [on_meta]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("way", "make"), [(way, make) for way, (_, _, makes) in SHARED.items() for make in makes]
)
def test_two_tensors_over_one_memory_are_refused_by_name(
    tmp_path: Path, way: str, make: Make
) -> None:
    change, message, _ = SHARED[way]
    with pytest.raises(UnsupportedError, match=message):
        offload.initialize(make(change, tmp_path), config(tmp_path))


def halves(model: Two) -> None:
    (base,) = model.base
    model.a.weight, model.b.weight = nn.Parameter(base[:8]), nn.Parameter(base[8:])


def copied(model: Two) -> None:
    same_data(model)
    model.a, model.b = copy.deepcopy(nn.ModuleList([model.a, model.b]))  # parts memory: torch's way


@pytest.mark.parametrize("make", [in_ram, lazily])
@pytest.mark.parametrize("change", [halves, weight_of_b(lambda a: a), copied, tied_buffers])
def test_what_is_apart_or_one_object_trains(tmp_path: Path, change: Change, make: Make) -> None:
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
