"""A gradient that is not finite on one rank: all skip the step, and no bit of a state changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offload
from offload.errors import NonfiniteError
from tests.offload.engine_cases import (
    HOST,
    NVME,
    TinyLM,
    batches,
    config,
    differing,
    seeded,
    states_of,
)
from tests.ranks.expert_programs import keys_of, spread
from tests.ranks.processes import heard, run_ranks
from tests.ranks.programs import BUDGET, OPTIMIZER
from tests.zero.test_loss_scale import Pair

MIXED = {**NVME, "gradients": "host"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        many = metafunc.config.getoption("--long")
        metafunc.parametrize("seeds", [range(n, n + 2) for n in range(20, 100 if many else 22, 2)])


ROW, MOST = 9, 3  # steps, and how many of them may be skipped in a row


@dataclass(frozen=True)
class Row:
    """A drawn run in fp16, and where gradients go wrong: rank, pass, parameter and value of each
    such step."""

    keys: dict[str, Any]
    placement: dict[str, Any]
    passes: int
    interval: int
    bad: dict[int, tuple[int, int, str, float]]

    @classmethod
    def drawn(cls, seed: int, world_size: int) -> Row:
        draw = random.Random(seed)
        names = [name for name, p in seeded(TinyLM).named_parameters() if p.requires_grad]
        passes, interval, often = draw.choice([1, 2]), draw.choice([1, 2]), draw.choice([0.3, 0.7])
        keys = {
            "zero": {"stage": seed % 4}, "gradient_accumulation_steps": passes,
            "clip_grad_norm": draw.choice([None, 0.5]), "max_skipped_steps": MOST,
            "loss_scale": {"initial": 16.0, "growth_interval": interval},
        }  # fmt: skip
        bad = {
            step: (
                draw.randrange(world_size), draw.randrange(passes), draw.choice(names),
                draw.choice([float("nan"), float("inf"), -float("inf")]),
            )
            for step in range(ROW) if draw.random() < often
        }  # fmt: skip
        return cls(keys, draw.choice([HOST, MIXED]), passes, interval, bad)

    @property
    def ends_at(self) -> int | None:
        """The step after which there is an error."""
        ends = (n for n in range(MOST - 1, ROW) if {n, n - 1, n - 2} <= self.bad.keys())
        return next(ends, None)


def follow(row: Row, folder: str) -> None:
    """Every rank skips the steps in which one of them has a bad gradient, its scale is that of a
    GradScaler, and all raise when the row is too long."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    keys = config(
        Path(folder), row.placement, budget=BUDGET, optimizer=OPTIMIZER, precision="fp16",
        **row.keys,
    )  # fmt: skip
    pair, data = Pair(16.0, row.interval), batches(row.passes * world_size)
    with offload.initialize(seeded(TinyLM), keys) as engine:
        now = (-1, -1)

        def spoil(gradient: Tensor, name: str) -> Tensor:
            step, number = now
            if row.bad.get(step, ())[:3] != (rank, number, name):
                return gradient
            return torch.full_like(gradient, row.bad[step][3])

        for name, param in engine.module.named_parameters():
            if param.requires_grad:
                param.register_hook(partial(spoil, name=name))
        for step in range(ROW):
            before, raised = states_of(engine), None
            for number in range(row.passes):
                now = (step, number)
                loss = engine.module.loss(data[number * world_size + rank])  # type: ignore[operator]
                engine.backward(loss / row.passes)
            try:
                engine.optimizer.step()
            except NonfiniteError as error:
                raised = error
            engine.optimizer.zero_grad()
            pair.step(overflow=step in row.bad)
            report = engine.report()
            skipped = sum(each <= step for each in row.bad)
            assert report.loss_scale == pair.theirs[0]
            assert (report.steps, report.skipped_steps) == (step + 1 - skipped, skipped)
            assert (differing(states_of(engine), before) == []) is (step in row.bad)
            assert (raised is not None) is (step == row.ends_at)
            if raised is not None:
                assert (raised.skipped_steps, raised.parameters) == (MOST, (row.bad[step][2],))
                return


def follow_all(rows: Sequence[Row], folder: str) -> None:
    for row in rows:
        follow(row, folder)


@pytest.mark.sample("seeds0-2")
@pytest.mark.parametrize("world_size", [2, 3])
def test_in_fp16_ranks_have_the_scale_of_a_gradscaler_and_raise_together(
    tmp_path: Path, world_size: int, seeds: range
) -> None:
    rows = [Row.drawn(seed, world_size) for seed in seeds]
    run_ranks(world_size, tmp_path, follow_all, rows, str(tmp_path))


def spoil_an_expert(folder: str) -> tuple[list[str], tuple[str, ...], int]:
    """Of the last rank alone; and then until there is an error."""
    model = spread(2)()
    keys = {**keys_of(folder, 2), "skip_nonfinite": True, "max_skipped_steps": 2}
    said = heard()
    with offload.initialize(model, keys) as engine:
        if dist.get_rank() == 1:
            param = dict(model.named_parameters())["blocks.2.moe.experts.3.0.weight"]
            param.register_hook(lambda gradient: gradient * float("nan"))
        steps = 0
        try:
            while True:
                steps += 1
                engine.backward(model.loss(batches(2)[dist.get_rank()]))
                engine.optimizer.step()
                engine.optimizer.zero_grad()
        except NonfiniteError as error:
            return [each for each in said if "not finite" in each], error.parameters, steps


def test_an_expert_of_another_rank_is_named_and_ranks_raise_together(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, spoil_an_expert, str(tmp_path))
    assert second[1] == ("blocks.2.moe.experts.3.0.weight",)
    assert first[1] == ("blocks.2.moe.experts.1.0.weight (of expert rank 1, in its place)",)
    assert first[2] == second[2] == 2
    assert first[0] == [
        f"the gradient of {first[1][0]} is not finite: step 1 is skipped; later ones are logged "
        "as INFO, and report() counts them"
    ]
