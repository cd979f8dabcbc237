"""Ranks that ask for different things of their gradients: each is told what all of them asked for,
at once, and none gets a number that is not right."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offload
from offload.errors import OffloadError
from tests.offload.engine_cases import HOST, TinyLM, batches, config, seeded
from tests.ranks.processes import run_ranks
from tests.ranks.programs import BUDGET, OPTIMIZER

TIMEOUT_S, GRACE_S = 8.0, 20.0  # only one of the asks below waits so long
Ask = Callable[[offload.Engine, bool], None]  # the engine, and whether this rank is the first


def _pass(engine: offload.Engine) -> None:
    tokens: Tensor = batches(1, seed=dist.get_rank())[0]
    engine.module.loss(tokens).backward()  # type: ignore[operator]


def _weights(engine: offload.Engine) -> list[Any]:
    return [block.mlp[0].weight for block in engine.module.blocks]  # type: ignore[union-attr]


def norm(engine: offload.Engine, first: bool) -> None:
    if first:
        _weights(engine)[0].grad.norm()
    engine.optimizer.step()


def values_of_others(engine: offload.Engine, first: bool) -> None:
    _weights(engine)[first].grad.sum()


def factor(engine: offload.Engine, first: bool) -> None:
    grad = _weights(engine)[0].grad
    grad.mul_(0.25 if first else 0.5)
    engine.optimizer.step()


def written(engine: offload.Engine, first: bool) -> None:
    torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
    if first:
        _weights(engine)[0].grad = torch.ones_like(_weights(engine)[0].grad)
    engine.optimizer.step()


def cleared(engine: offload.Engine, first: bool) -> None:
    if first:
        _weights(engine)[0].grad = None
    engine.optimizer.step()


def cleared_amid_passes(engine: offload.Engine, first: bool) -> None:
    if first:
        _weights(engine)[0].grad = None
    _pass(engine)
    engine.optimizer.step()


def cleared_after_a_step(engine: offload.Engine, first: bool) -> None:
    engine.optimizer.step()
    if first:
        engine.optimizer.zero_grad()
    _pass(engine)
    engine.optimizer.step()


# by ask: what each rank is told, of rank 0 and of rank 1
STEP = ".*before a step"
USE = r".*before a use of param\.grad \(blocks\.0\.mlp\.0\.weight\.grad\)"
CLEARED = r"rank 0 .*blocks\.0\.mlp\.0\.weight\.grad is cleared; rank 1 "
ASKS: dict[Ask, str] = {
    norm: f"rank 0 {USE}.*; rank 1 {STEP}",
    values_of_others: r"rank 0 .*blocks\.1\.mlp\.0\.weight.*; rank 1 .*blocks\.0\.mlp\.0\.weight",
    factor: r"weight\.grad times 0\.25.*; rank 1 .*weight\.grad times 0\.5",
    written: r"weight\.grad is cleared.*; rank 1 ",
    cleared: CLEARED,
    cleared_amid_passes: CLEARED,
    cleared_after_a_step: "rank 0 .*all gradients are cleared; rank 1",
}


def ask(number: int, stage: int, folder: str) -> tuple[str, float]:
    """What this rank is told, and after what time."""
    zero = {"stage": stage, "timeout_s": TIMEOUT_S}
    keys = config(Path(folder), HOST, budget=BUDGET, optimizer=OPTIMIZER, zero=zero)
    with offload.initialize(seeded(TinyLM), keys) as engine:
        _pass(engine)
        began = time.monotonic()
        try:
            list(ASKS)[number](engine, dist.get_rank() == 0)
        except OffloadError as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "nothing", 0.0


def ask_all(stage: int, folder: str) -> list[tuple[str, float]]:
    return [ask(number, stage, folder) for number in range(len(ASKS))]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_ask_for_different_things_are_told(
    stage: int, tmp_path: Path, long: bool
) -> None:
    if not long and stage == 3:  # in which a pass waits for the other rank
        pytest.skip("in make test-long")
    for answers in run_ranks(2, tmp_path, ask_all, stage, str(tmp_path)):
        for (each, words), (told, took) in zip(ASKS.items(), answers, strict=True):
            assert re.match(f"RankError: .*({words})", told), f"{each.__name__}: {told}"
            assert took < TIMEOUT_S + GRACE_S, each.__name__
