"""Leaf modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from offload.deepspeed import utils
from offload.tiers.errors import UnsupportedError
from tests.deepspeed.loops import ADAMW, IN, OUT, batch, initialized
from tests.ranks.processes import run_ranks

WIDE = 300  # a layer of more elements than a subtree that is one unit anyway
ONE = {
    "train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW, "zero_optimization": {"stage": 3},
}  # fmt: skip


class Branches(nn.Module):
    """Each rank takes another one."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(WIDE, WIDE) for _ in range(2)])
        self.taken = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[self.taken if self.taken >= 0 else dist.get_rank()](x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(IN, WIDE)
        self.middle = Branches()
        self.last = nn.Linear(WIDE, OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def test_leaves_are_named_as_in_deepspeed() -> None:
    net = Net()
    assert utils.set_z3_leaf_modules(net, [nn.ModuleList]) == [net.middle.branches]
    assert utils.set_z3_leaf_modules(net, [f"{__name__}.Branches"]) == [net.middle]
    assert utils.get_z3_leaf_modules(net) == [net.middle, net.middle.branches]
    with pytest.raises(ValueError, match="Net has no module"):
        utils.set_z3_leaf_modules(net, ["Absent"])


def test_a_leaf_of_several_groups_is_refused_until_it_is_a_block() -> None:
    net = Net()
    utils.set_z3_leaf_modules(net, [nn.Linear])
    utils.check_leaves(net, ())
    utils.set_z3_leaf_modules(net, [Branches])
    with pytest.raises(UnsupportedError, match=r"middle \(Branches\) is a leaf"):
        utils.check_leaves(net, ())
    utils.check_leaves(net, ["Branches"])


def branching(_folder: str) -> list[float]:
    config: dict[str, Any] = {
        **ONE, "zero_optimization": {"stage": 3, "leaf_module": {"classes": ["Branches"]}},
        "offload": {"groups": {"blocks": ["Branches"]}},
    }  # fmt: skip
    losses = []
    with initialized(Net(), config) as engine:
        for _ in range(3):
            x, y = batch(dist.get_rank())
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def test_ranks_may_take_different_branches_of_a_leaf(tmp_path: Path) -> None:
    net, expected = Net(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        losses = []
        for net.middle.taken in 0, 1:
            x, y = batch(net.middle.taken)
            loss = nn.functional.mse_loss(net(x), y)
            (loss / 2).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(losses)
    found = run_ranks(2, tmp_path, branching, "")
    assert list(zip(*found, strict=True)) == [pytest.approx(each, rel=1e-4) for each in expected]
