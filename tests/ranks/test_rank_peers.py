"""The same model under DDP, FSDP2 and here: the same losses, to the rounding of other sums; and
hybrid sharding."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offload
from tests.offload.engine_cases import (
    HOST,
    NVME,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    losses_of,
    parameters_of,
    seeded,
)
from tests.ranks.processes import run_ranks
from tests.ranks.programs import BUDGET, Case, Outcome, assert_near, train_all

STEPS, CLIP = 4, 0.5
NUMBERS: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}


def mine() -> list[Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return batches(STEPS * world_size)[rank::world_size]


class WithLoss(nn.Module):
    """The loss as a forward: what wraps a model sees nothing else."""

    def __init__(self, model: TinyLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.loss(tokens)


def peer(model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    """Plain PyTorch on a model that takes care of its ranks itself."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **NUMBERS)
    losses = []
    for tokens in mine():
        loss = model(tokens)
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    full = {n: _full(p).detach().clone() for n, p in model.named_parameters()}
    return losses, {name.rpartition("model.")[2]: value for name, value in full.items()}


def _full(param: Tensor) -> Tensor:
    return param.full_tensor() if hasattr(param, "full_tensor") else param


def everybody(folder: str) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    sharded = WithLoss(seeded(TinyLM))
    for block in sharded.model.blocks:
        fully_shard(block)
    fully_shard(sharded)
    # DDP sees every parameter in the graph: frozen ones are left out
    outcomes = {
        "ddp": peer(DistributedDataParallel(WithLoss(seeded(TinyLM)))),
        "fsdp2": peer(sharded),
    }
    for stage in (0, 3):  # others have the same bits
        keys = config(
            Path(folder), HOST, budget=BUDGET, clip_grad_norm=CLIP, zero={"stage": stage},
            optimizer={**NUMBERS, "chunk": 2048},
        )  # fmt: skip
        with offload.initialize(seeded(TinyLM), keys) as engine:
            outcomes[f"stage {stage}"] = losses_of(engine, mine()), parameters_of(engine)
    return outcomes


@pytest.mark.slow
def test_ddp_and_fsdp2_have_the_same_losses(tmp_path: Path) -> None:
    for outcomes in run_ranks(3, tmp_path, everybody, str(tmp_path)):  # with uneven shards
        losses, params = outcomes["ddp"]
        for name, (actual, values) in outcomes.items():
            assert actual == pytest.approx(losses, rel=1e-6), name
            for key, value in values.items():
                assert_near(value, params[key], what=(name, key))


HYBRID = [
    Case(stage, homes, keys={"zero": {"stage": stage, "shard_group": 2}})
    for stage in (1, 2, 3) for homes in (HOST, NVME)
]  # fmt: skip


@pytest.mark.slow
def test_a_hybrid_shards_within_groups_and_sums_across_them(tmp_path: Path, long: bool) -> None:
    hybrid = HYBRID if long else [HYBRID[0], *HYBRID[3:]]  # each stage, and each placement
    cases = [*hybrid, Case(3, HOST)]
    outcomes: list[list[Outcome]] = run_ranks(4, tmp_path, train_all, cases, str(tmp_path))
    first, full = outcomes[0][0], outcomes[0][-1]
    for per_rank in outcomes:
        for outcome in per_rank[: len(hybrid)]:
            assert_same_bits(outcome.states, first.states)  # on every rank of every group
    assert first.norms == pytest.approx(full.norms, rel=1e-6)
    for name, value in full.states.items():
        assert_near(value, first.states[name], 2e-6, name)
    assert first.moved["all-reduce"] > 0
    assert full.moved["all-reduce"] == 0
