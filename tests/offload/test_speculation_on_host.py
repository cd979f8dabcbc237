"""Speculative updates of records in host memory, which codes undo: the bits of deferred updates.

Host memory stands in for the device's, as in `test_mirror.py`: where a CPU computes, such groups
are not speculative.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.engine import Engine
from offload.planning.plan.plan import needed_nbytes, speculative_groups
from offload.planning.step.memory import find_copies
from offload.tiers.tier import Tier
from offload.zero.groups.parameter_grouping import group_parameters
from offload.zero.step import undo_codes
from offload.zero.step.deferred_updates import SpeculationCounts
from tests.offload.engine_cases import plan_for_a_gpu
from tests.offload.test_background_saves import files_of, slow
from tests.offload.test_speculative_updates import (
    ON_HOST,
    WORDS,
    Program,
    draw,
    engine_of,
    loss_of,
    step,
    trained,
)

MIXED = {"host": "50%", "nvme": "50%"}
PLACEMENTS: tuple[dict[str, Any], ...] = (
    ON_HOST, {**ON_HOST, "optimizer": MIXED}, {**ON_HOST, "gradients": "nvme"},
    {"parameters": "nvme", "gradients": "host", "optimizer": MIXED},
    {"parameters": "nvme", "gradients": "nvme", "optimizer": "host"},
    {**ON_HOST, "parameters": MIXED, "optimizer": MIXED},
)  # fmt: skip
BUDGET = {"device": "1MiB", "host": "64MiB", "nvme": "256MiB"}


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_for_a_gpu(monkeypatch)


def compared(seed: int, folder: Path, placement: dict[str, Any], program: Program,
             *, force: bool, **keys: Any) -> SpeculationCounts:  # fmt: skip
    """The counts of a run on the device that stands in, whose bits are those of one without it."""
    with pytest.MonkeyPatch.context() as patch:
        plan_for_a_gpu(patch)
        keys = {"budget": BUDGET, **keys}
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
def test_drawn_loops_have_the_bits_of_deferred_updates(
    tmp_path: Path, program_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them with codes that overflow now and then."""
    keys, program = draw(program_seed)
    drawn = random.Random(program_seed)
    keys["precision"] = drawn.choice(["fp32", "bf16", "bf16", "fp16"])
    keys["optimizer"]["type"] = drawn.choice(["adamw", "adamw", "adam"])
    if keys["precision"] == "bf16":
        keys["optimizer"]["master"] = drawn.choice(["split", "fp32"])
    elif keys["precision"] == "fp16":
        keys["skip_nonfinite"] = True
    if program_seed % 2 == 0:
        overflow_of(monkeypatch, lambda: drawn.random() < 0.1)
    placement = PLACEMENTS[program_seed // 2 % len(PLACEMENTS)]
    compared(program_seed, tmp_path, placement, program, force=True, **keys)


def overflow_of(patch: pytest.MonkeyPatch, overflows: Callable[[], bool]) -> None:
    """Let a code have too little room where `overflows()`."""
    real = undo_codes.undoable_step
    patch.setattr(undo_codes, "undoable_step", lambda *args, **more: not overflows()
                  and real(*args, **more))  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(len(PLACEMENTS)))
def test_a_loop_that_clips_nothing_is_updated_in_backward(tmp_path: Path, number: int) -> None:
    keys = {"clip_grad_norm": 1e9, "precision": ["bf16", "fp32"][number % 2]}
    program: Program = [(1, [])] * 6
    counts = compared(number, tmp_path, PLACEMENTS[number], program, force=False, **keys)
    assert counts.kept
    assert not counts.taken_back


@contextmanager
def trained_engine(folder: Path, steps: int = 8, **keys: Any) -> Iterator[Engine]:
    """After so many steps, of which the first ones have no codes that suffice."""
    keys = {"budget": BUDGET, "precision": "bf16", **keys}
    with engine_of(1, folder, ON_HOST, optimizer={"chunk": 2048}, **keys) as engine:
        for _ in range(steps):
            step(engine)
        yield engine


def backward(engine: Engine) -> None:
    engine.backward(loss_of(engine.module, WORDS))


def states_of(engine: Engine) -> list[torch.Tensor]:
    states = engine.optimizer.state_dict()["state"]
    return [
        *(value.clone() for value in engine.module.state_dict().values()),
        *(states[key][name] for key in states for name in ("exp_avg", "exp_avg_sq")),
    ]


def made_chunks(engine: Engine) -> int:
    """The chunks that codes undo, once all updates are over."""
    engine._runtime.updates.settle()
    policy = engine._runtime.stepper.policy
    codes = [update.codes for update in policy._updates.values()]
    return sum(len(each.made) for each in codes if each is not None)


@pytest.mark.parametrize("overflows", [False, True])
def test_a_step_decides_while_a_code_is_written(
    tmp_path: Path, overflows: bool, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit any more is stepped without a code, which is not needed any more."""
    states, real, accept = [], undo_codes.undoable_step, undo_codes.Codes.accept
    for late in False, True:
        accepted = threading.Event()

        def accepts(codes: Any, accepted: threading.Event = accepted) -> Any:
            rest = accept(codes)
            accepted.set()
            return rest

        def writes(*args: Any, accepted: threading.Event = accepted, **more: Any) -> bool:
            accepted.wait(3)  # or the step waits for this one
            return not overflows and real(*args, **more)

        with trained_engine(tmp_path) as engine, monkeypatch.context() as patch:
            if late:
                patch.setattr(undo_codes, "undoable_step", writes)
                patch.setattr(undo_codes.Codes, "accept", accepts)
            step(engine)
            states.append(states_of(engine))
            counts = engine.report().trials
            assert counts.redone < 3 * len(engine.store.groups)
            engine.check_integrity()
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_codes_take_the_memory_that_was_planned_until_the_step(
    tmp_path: Path, on_a_gpu: None
) -> None:
    with trained_engine(tmp_path) as engine:
        ledger, plan = engine._tier_manager.ledger, engine.plan
        codes = sum(old.memory for old in speculative_groups(plan, engine.config).values())
        engine.settle()
        before = ledger.accounts[Tier.HOST].used_nbytes
        backward(engine)
        assert ledger.accounts[Tier.HOST].used_nbytes == before + codes
        engine.optimizer.step()
        engine.settle()
        assert ledger.accounts[Tier.HOST].used_nbytes == before
        assert ledger.accounts[Tier.HOST].peak_nbytes == plan.total(Tier.HOST) + codes
        said = find_copies(plan, engine.config, group_parameters(engine.module, ()).shape(), 1)
        assert said.nbytes == codes


def test_without_room_for_all_codes_some_groups_wait_for_the_step(
    tmp_path: Path, on_a_gpu: None
) -> None:
    with trained_engine(tmp_path, steps=0) as engine:
        needed = needed_nbytes(engine.plan, Tier.HOST)
    for more in (4096, 200_000):
        budget = {**BUDGET, "host": needed + more}
        with trained_engine(tmp_path, budget=budget) as engine:
            backward(engine)
            policy = engine._runtime.stepper.policy
            begun = sum(group.index in policy for group in engine.store.groups)
            assert (begun > 0) == (more > 4096)
            assert begun < len(engine.store.groups)
            assert begun == len(speculative_groups(engine.plan, engine.config))


def test_an_engine_that_is_closed_before_the_step_gives_back_the_old_values(
    tmp_path: Path, on_a_gpu: None
) -> None:
    values = []
    for speculates in True, False:
        with trained_engine(tmp_path) as engine:
            engine._runtime.stepper.policy.on = speculates  # type: ignore[union-attr]
            backward(engine)
            assert bool(made_chunks(engine)) == speculates
            model = engine.module
        values.append([param.detach().clone() for param in model.parameters()])
    torch.testing.assert_close(*values, rtol=0, atol=0)


def test_the_report_says_that_no_update_is_speculative_where_every_step_clips(
    tmp_path: Path, on_a_gpu: None
) -> None:
    with trained_engine(tmp_path, steps=3, clip_grad_norm=1e-3) as engine:
        said = "no update was made in backward: 3 steps clipped or were skipped, so the updates of"
        assert said in str(engine.report())
    with trained_engine(tmp_path, steps=3, clip_grad_norm=1e9) as engine:
        assert "clipped or were" not in str(engine.report())
        assert engine.report().trials.kept


@pytest.mark.parametrize("reads", [False, True])
def test_a_save_in_the_background_has_the_values_of_its_step(
    tmp_path: Path, reads: bool, on_a_gpu: None
) -> None:
    """Updates of the next backward wait until the save has passed their group; they count, or are
    taken back by a read while others still wait."""
    waited, behind = tmp_path / "waited", tmp_path / "behind"
    with trained_engine(tmp_path) as engine, slow(max_s=0.03):
        for _ in range(4):
            engine.save_checkpoint(waited)
            engine.save_checkpoint(behind, wait=False)
            engine._runtime.stepper.policy.on = True  # type: ignore[union-attr]
            backward(engine)
            policy = engine._runtime.stepper.policy
            assert any(group.index in policy for group in engine.store.groups)
            if reads:
                states_of(engine)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            engine.checkpoint_saved()
            assert files_of(behind) == files_of(waited)
        assert engine.report().trials.kept or reads
        assert engine.report().trials.taken_back or not reads
        states = states_of(engine)
    with trained_engine(tmp_path, steps=12) as engine:
        torch.testing.assert_close(states_of(engine), states, rtol=0, atol=0)
