"""One rank is short of memory: its copies alone give way."""

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import offload
from offload.memory import tier_manager
from tests.offload.engine_cases import (
    HOST,
    NVME,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    losses_of,
    seeded,
    states_of,
)
from tests.offload.test_memory_guard import Drawn, Machine, looked_at
from tests.ranks.processes import run_ranks
from tests.ranks.programs import BUDGET, OPTIMIZER

STEPS, SHORT = 4, 1  # so many steps; which rank is short of memory
MIXED = {"parameters": "nvme", "gradients": "host", "optimizer": {"host": "40%", "nvme": "60%"}}


def train(folder: str, placement: dict[str, Any], stage: int, pressed: bool) -> dict[str, Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    machine = Machine()
    tier_manager.read_headroom = machine  # type: ignore[assignment]
    keys = config(
        Path(folder), placement, budget=BUDGET, optimizer=OPTIMIZER,
        zero={"stage": stage, "timeout_s": 20.0}, clip_grad_norm=0.5,
    )  # fmt: skip
    data = batches(STEPS * world_size)[rank::world_size]
    with offload.initialize(seeded(TinyLM), keys) as engine:
        guard = engine._tier_manager.guard
        drawn = Drawn(machine, random.Random(stage), 512 << 10)
        with looked_at(guard, drawn) if pressed and rank == SHORT else nullcontext():
            losses_of(engine, data)
        return states_of(engine)


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "stage"), [(NVME, 3), (MIXED, 2), (HOST, 1)])
def test_bits_are_those_of_ranks_with_enough_memory(
    tmp_path: Path, placement: dict[str, Any], stage: int
) -> None:
    folder = str(tmp_path)
    expected = run_ranks(2, tmp_path, train, folder, placement, stage, False)
    pressed = run_ranks(2, tmp_path, train, folder, placement, stage, True)
    for states, same in zip(expected, pressed, strict=True):
        assert_same_bits(states, same)
