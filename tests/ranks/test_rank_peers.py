"""The same model under DDP, FSDP2 and here: the same losses, to the rounding of other sums; hybrid
sharding, and what a step moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.zero.groups.discovery import discover
from tests.offload.engine_cases import (
    HOST,
    NVME,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    parameters_of,
    seeded,
)
from tests.ranks.processes import run_ranks
from tests.ranks.programs import BUDGET, OPTIMIZER, Case, Outcome, train_all

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
    torch.set_num_threads(1)
    sharded = WithLoss(seeded(TinyLM))
    for block in sharded.model.blocks:
        fully_shard(block)
    fully_shard(sharded)
    # DDP sees every parameter in the graph: frozen ones are left out
    found = {
        "ddp": peer(DistributedDataParallel(WithLoss(seeded(TinyLM)))),
        "fsdp2": peer(sharded),
    }
    for stage in (0, 3):  # others have the same bits
        keys = config(
            Path(folder), HOST, budget=BUDGET, clip_grad_norm=CLIP, zero={"stage": stage},
            optimizer={**NUMBERS, "chunk": 2048},
        )  # fmt: skip
        losses = []
        with offload.initialize(seeded(TinyLM), keys) as engine:
            for tokens in mine():
                loss = engine.module.loss(tokens)  # type: ignore[operator]
                engine.backward(loss)
                losses.append(loss.item())
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            found[f"stage {stage}"] = losses, parameters_of(engine)
    return found


def test_ddp_and_fsdp2_have_the_same_losses(tmp_path: Path) -> None:
    for outcomes in run_ranks(3, tmp_path, everybody, str(tmp_path)):  # with uneven shards
        losses, params = outcomes["ddp"]
        for name, (found, values) in outcomes.items():
            assert found == pytest.approx(losses, rel=1e-6), name
            for key, value in values.items():
                expected = params[key]
                distance = (value - expected).norm() / expected.norm()
                assert distance <= 1e-6, (name, key, distance.item())


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
        for found in per_rank[: len(hybrid)]:
            assert_same_bits(found.states, first.states)  # on every rank of every group
    assert first.norms == pytest.approx(full.norms, rel=1e-6)
    for name, value in full.states.items():
        expected = first.states[name].double()
        distance = (value.double() - expected).norm() / max(expected.norm(), 1e-30)
        assert distance <= 2e-6, (name, distance.item())
    assert first.moved["all-reduce"] > 0
    assert full.moved["all-reduce"] == 0


# ------------------------------------------------------------------------- what a step moves
BLOCKS = 12


def moved_per_step(stage: int, folder: str) -> tuple[dict[str, int], int]:
    """Bytes of one step after the first ones, and the room for gathered parameters."""
    torch.set_num_threads(1)
    keys = config(
        Path(folder), HOST, budget=BUDGET, zero={"stage": stage}, optimizer={**OPTIMIZER}
    )  # fmt: skip
    with offload.initialize(seeded(lambda: TinyLM(BLOCKS)), keys) as engine:
        seen = []
        for tokens in mine()[:4]:
            engine.backward(engine.module.loss(tokens))  # type: ignore[operator]
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            engine.settle()
            seen.append(engine.report().bytes_moved)
        shared = engine.plan.shared
        assert shared is not None
        return {key: seen[-1][key] - seen[-2][key] for key in seen[-1]}, shared.gather_nbytes


def moved_at_all_stages(folder: str) -> list[tuple[dict[str, int], int]]:
    return [moved_per_step(stage, folder) for stage in range(4)]


@pytest.fixture(scope="module")
def moved_by_rank(
    tmp_path_factory: pytest.TempPathFactory,
) -> list[list[tuple[dict[str, int], int]]]:
    folder = tmp_path_factory.mktemp("moved")
    return run_ranks(2, folder, moved_at_all_stages, str(folder), timeout_s=120)


@pytest.mark.parametrize("stage", range(4))
def test_a_step_moves_two_or_three_times_the_parameters(
    moved_by_rank: list[list[tuple[dict[str, int], int]]], stage: int
) -> None:
    """Rajbhandari et al., 2020: 2 psi for stages 1 and 2, 3 psi for stage 3."""
    groups = (
        discover(TinyLM(BLOCKS)).shape().sharded(1 if stage == 0 else 2, 2 if stage == 0 else 1)
    )
    trained = sum(group.layout.numel_trainable for group in groups.groups) * 4
    frozen = sum(group.layout.numel for group in groups.groups) * 4 - trained
    for moved, room in (per_stage[stage] for per_stage in moved_by_rank):
        if stage == 0:  # whole gradients: exchanged, and gathered again
            assert moved == {**moved, "reduce-scatter": 0, "all-gather": 0}
            assert moved["all-reduce"] == 2 * trained
            continue
        assert moved["reduce-scatter"] == trained
        assert moved["all-reduce"] == 0
        if stage < 3:
            assert moved["all-gather"] == trained
            continue
        # at the turn from forward to backward, what is in the room is not gathered again
        gathered = 2 * (trained + frozen)
        assert gathered - room <= moved["all-gather"] < gathered
