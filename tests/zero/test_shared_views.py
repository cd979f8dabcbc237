"""Two parameters over one memory are refused by name; what only lies side by side is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload.errors import UnsupportedError
from tests.offload.engine_cases import MARKS, NVME, ON, config

pytestmark = MARKS


class Two(nn.Module):
    def __init__(self, change: Callable[[Two], None]) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)
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


def transposed(model: Two) -> None:
    model.b.weight = nn.Parameter(model.a.weight.data.t())


def one_row(model: Two) -> None:
    base = torch.randn(15, 8)
    model.a.weight, model.b.weight = nn.Parameter(base[:8]), nn.Parameter(base[7:])


def by_numpy(model: Two) -> None:
    array = model.a.weight.detach().numpy()
    model.b.weight = nn.Parameter(torch.from_numpy(array))


@pytest.mark.parametrize("change", [same, same_by_data, frozen, transposed, one_row, by_numpy])
def test_two_parameters_over_one_memory_are_refused_by_name(
    tmp_path: Path, change: Callable[[Two], None]
) -> None:
    message = r"a\.weight and b\.weight are two parameters with the same memory.*one object"
    with pytest.raises(UnsupportedError, match=message):
        offload.initialize(Two(change), config(tmp_path))


def view_as_buffer(model: Two) -> None:
    model.register_buffer("first", model.a.weight.data[0])


def test_a_buffer_over_a_trainable_parameter_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"buffer first shares memory .* a\.weight"):
        offload.initialize(Two(view_as_buffer), config(tmp_path))


def halves(model: Two) -> None:
    base = torch.randn(16, 8)
    model.a.weight, model.b.weight = nn.Parameter(base[:8]), nn.Parameter(base[8:])


def columns_in_turn(model: Two) -> None:
    base = torch.randn(8, 16)
    model.a.weight, model.b.weight = nn.Parameter(base[:, ::2]), nn.Parameter(base[:, 1::2])


def tied(model: Two) -> None:
    model.b.weight = model.a.weight


def frozen_with_a_buffer(model: Two) -> None:
    model.a.weight.requires_grad_(False)
    view_as_buffer(model)


@pytest.mark.parametrize("change", [halves, columns_in_turn, tied, frozen_with_a_buffer])
def test_what_is_apart_or_one_object_trains(tmp_path: Path, change: Callable[[Two], None]) -> None:
    torch.manual_seed(0)
    model = Two(change)
    x = torch.randn(4, 8)
    expected = model(x)
    with offload.initialize(model, config(tmp_path, NVME)) as engine:
        found = model(x.to(ON))
        torch.testing.assert_close(found.cpu(), expected)  # of strided weights in another order
        found.sum().backward()
        engine.optimizer.step()
