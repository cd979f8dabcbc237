"""A parameter is written between a forward and its backward: whose backward that outdates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import ModifiedError
from tests.offload.engine_cases import HOST, NVME, config, seeded

PLACEMENTS = {"host": HOST, "nvme": NVME}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "copy_": lambda p: p.copy_(p * 2), "add_": lambda p: p.add_(1.0),
    "clamp_": lambda p: p.clamp_(-0.1, 0.1), "foreach": lambda p: torch._foreach_mul_([p], 2.0),
}  # fmt: skip


def two() -> nn.Module:
    """Two matrices of one group."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def started(folder: Path, placement: str) -> tuple[offload.Engine, Tensor, Tensor]:
    keys: dict[str, Any] = {"groups": {"blocks": ["Sequential"]}}
    engine = offload.initialize(seeded(two), config(folder, PLACEMENTS[placement], **keys))
    x = torch.ones(2, 4, requires_grad=True)
    return engine, x, engine.module(x).square().sum()


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_write_outdates_the_graphs_that_saved_the_parameter(
    tmp_path: Path, placement: str, write: Callable[[Tensor], Any]
) -> None:
    engine, _, loss = started(tmp_path, placement)
    with engine:
        with torch.no_grad():
            write(engine.module[2].weight)
        with pytest.raises(ModifiedError, match=r"2\.weight|modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_write_leaves_graphs_alone_that_saved_other_parameters_of_the_group(
    tmp_path: Path, placement: str
) -> None:
    plain = seeded(two)
    x = torch.ones(2, 4, requires_grad=True)
    plain(x).square().sum().backward()
    engine, mine, loss = started(tmp_path, placement)
    with engine:
        with torch.no_grad():
            engine.module[2].bias.add_(1.0)  # no product saves it
        loss.backward()
        assert x.grad is not None
        assert mine.grad is not None
        assert torch.equal(mine.grad, x.grad)
