"""Speculative updates of records in host memory, which codes undo: the bits of deferred updates.

Host memory stands in for the device's, as in `test_mirror.py`: where a CPU computes, such groups
are not speculative.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.zero.step.deferred_updates import SpeculationCounts
from tests.offload.engine_cases import plan_for_a_gpu
from tests.offload.test_speculative_updates import ON_HOST, Program, draw, engine_of, run

MIXED = {"host": "50%", "nvme": "50%"}
PLACEMENTS: tuple[dict[str, Any], ...] = (
    ON_HOST, {**ON_HOST, "optimizer": MIXED}, {**ON_HOST, "gradients": "nvme"},
    {"parameters": "nvme", "gradients": "host", "optimizer": MIXED},
    {"parameters": "nvme", "gradients": "nvme", "optimizer": "host"},
    {**ON_HOST, "parameters": MIXED, "optimizer": MIXED},
)  # fmt: skip
BUDGET = {"device": "1MiB", "host": "64MiB", "nvme": "256MiB"}
Seen = tuple[list[Any], dict[str, Any], dict[Any, Any]]


def trained(seed: int, folder: Path, placement: dict[str, Any], program: Program,
            *, force: bool, **keys: Any) -> tuple[Seen, SpeculationCounts]:  # fmt: skip
    """What the loop sees, the values and states in the end, and what became of the updates."""
    with engine_of(seed, folder, placement, **{"budget": BUDGET, **keys}) as engine:
        seen, values = run(engine, program, force=force)
        engine.check_integrity()
        report = engine.report()
        assert report.tiers["host"].peak_nbytes <= report.tiers["host"].budget_nbytes
        return (seen, values, engine.optimizer.state_dict()["state"]), report.trials


def compared(seed: int, folder: Path, placement: dict[str, Any], program: Program,
             *, force: bool, **keys: Any) -> SpeculationCounts:  # fmt: skip
    """The counts of a run on the device that stands in, whose bits are those of one without it."""
    with pytest.MonkeyPatch.context() as patch:
        plan_for_a_gpu(patch)
        got, counts = trained(seed, folder, placement, program, force=force, **keys)
    keys["budget"] = {"host": "64MiB"}
    expected, deferred = trained(seed, folder, ON_HOST, program, force=False, **keys)
    assert not deferred.kept
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    return counts


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "program_seed" in metafunc.fixturenames:
        many = metafunc.config.getoption("--long")
        metafunc.parametrize("program_seed", range(240 if many else 8))


@pytest.mark.sample(3)
def test_drawn_loops_have_the_bits_of_deferred_updates(tmp_path: Path, program_seed: int) -> None:
    keys, program = draw(program_seed)
    drawn = random.Random(program_seed)
    keys["optimizer"]["type"] = drawn.choice(["adamw", "adamw", "adam"])
    if keys["precision"] == "bf16":
        keys["optimizer"]["master"] = drawn.choice(["split", "fp32"])
    placement = PLACEMENTS[program_seed % len(PLACEMENTS)]
    compared(program_seed, tmp_path, placement, program, force=True, **keys)


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(len(PLACEMENTS)))
def test_a_loop_that_clips_nothing_is_updated_in_backward(tmp_path: Path, number: int) -> None:
    keys = {"clip_grad_norm": 1e9, "precision": ["bf16", "fp32"][number % 2]}
    program: Program = [(1, [])] * 6
    counts = compared(number, tmp_path, PLACEMENTS[number], program, force=False, **keys)
    assert counts.kept
    assert not counts.taken_back
