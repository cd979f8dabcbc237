"""Whatever memory the machine has left while an engine trains, the bits are the same."""

from __future__ import annotations

import gc
import logging
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload.memory.memory_guard import Headroom, MemoryGuard
from tests.offload.engine_cases import (
    HOST,
    MARKS,
    NVME,
    TinyLM,
    batches,
    config,
    min_budget,
    seeded,
)
from tests.offload.engine_states import assert_same_bits, losses_of, states_of
from tests.offload.test_speculative_updates import engine_of, run

pytestmark = MARKS
MIB = 1 << 20
PLENTY = Headroom("RAM", 64 << 30, 32 << 30, 1 << 30)


class Machine:
    """A machine whose memory is what a test says."""

    def __init__(self) -> None:
        self.now = PLENTY

    def __call__(self) -> list[Headroom]:
        return [self.now]

    def has(self, spare_nbytes: int) -> None:
        reserve = 64 * MIB
        self.now = Headroom("RAM", 1 << 30, spare_nbytes + reserve, reserve)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr("offload.memory.tier_manager.read_headroom", made)
    return made


@dataclass
class Drawn:
    """Another value for every few looks."""

    machine: Machine
    random: random.Random
    max_nbytes: int
    left: int = 0

    def draw(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.left = self.random.randrange(5)
            self.machine.has(self.random.randint(-self.max_nbytes, self.max_nbytes))


@contextmanager
def looked_at(guard: MemoryGuard, drawn: Drawn) -> Iterator[None]:
    """Inside, another thread draws a free-memory figure and looks, every millisecond."""
    ends = threading.Event()

    def look() -> None:
        while not ends.wait(0.001):
            drawn.draw()
            guard.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def keys_of(drawn: random.Random, folder: Path) -> tuple[dict[str, Any], int]:
    mixed: Any = {"host": "40%", "nvme": "60%"}
    placement = drawn.choice([
        NVME, NVME, {**NVME, "gradients": "host"}, {**HOST, "optimizer": "nvme"},
        {"parameters": mixed, "gradients": "nvme", "optimizer": mixed},
    ])  # fmt: skip
    precision = drawn.choice(["fp32", "bf16"])
    accumulate = drawn.choice([1, 1, 2])
    if precision != "fp32" and accumulate > 1:  # sums in fp32 are refused on nvme
        placement = {**placement, "gradients": "host"}
    tier, checkpoint = drawn.choice([("device", False), ("nvme", False), ("nvme", True)])
    keys = config(
        folder, {**placement, "activations": {"tier": tier, "checkpoint": checkpoint}},
        precision=precision, gradient_accumulation_steps=accumulate,
        clip_grad_norm=drawn.choice([None, None, 0.5]), prefetch=drawn.choice([0, "auto", 8]),
        optimizer={"lr": 3e-3, "weight_decay": 0.1, "chunk": drawn.choice([2048, "auto"])},
    )  # fmt: skip
    if tier == "nvme":
        keys["budget"] = {**keys["budget"], "host": "32MiB"}
    elif drawn.random() < 0.3:
        keys["budget"] = min_budget(TinyLM, keys)
    return keys, accumulate


def train(engine: offload.Engine, accumulate: int) -> list[float]:
    return losses_of(engine, batches(5 * accumulate), accumulate)


def differs(seed: int, folder: Path, machine: Machine) -> int:
    """Compare a run under pressure with one without; bytes that were given up."""
    drawn = random.Random(seed)
    keys, accumulate = keys_of(drawn, folder)
    runs: list[tuple[list[float], dict[str, Tensor]]] = []
    given_up = 0
    for pressed in (False, True):
        machine.now = PLENTY
        with offload.initialize(seeded(TinyLM), keys) as engine:
            guard, budget = engine._tier_manager.guard, engine.plan.budgets
            # about what the tier holds of so small a model
            used = min(max(budget.values()), 512 << 10)
            if pressed:
                with looked_at(guard, Drawn(machine, drawn, used)):
                    losses = train(engine, accumulate)
                    engine.save_checkpoint(folder / "saved")
                    engine.load_checkpoint(folder / "saved")
                    states = states_of(engine)
                given_up = engine.report().memory.given_back_nbytes
            else:
                losses, states = train(engine, accumulate), states_of(engine)
            runs.append((losses, states))
            engine.check_integrity()
    assert runs[0][0] == runs[1][0], keys
    assert_same_bits(runs[0][1], runs[1][1])
    return given_up


def test_no_pressure_changes_a_bit(tmp_path: Path, machine: Machine, long: bool) -> None:
    given_up = [differs(seed, tmp_path, machine) for seed in range(200 if long else 4)]
    assert sum(nbytes > 0 for nbytes in given_up) > len(given_up) // 4, given_up


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_speculative_updates_keep_their_bits_under_pressure(
    tmp_path: Path, machine: Machine, seed: int
) -> None:
    program: list[Any] = [
        (1, []), (1, ["read"]), (2, []), (1, ["infinite"]), (1, ["clip"]), (1, []), (1, ["eval"]),
        (1, ["lr"]), (1, []),
    ]  # fmt: skip
    keys = {"clip_grad_norm": None, "skip_nonfinite": True}
    ways: list[tuple[list[Any], dict[str, Tensor]]] = []
    for pressed in (False, True):
        machine.now = PLENTY
        with engine_of(seed, tmp_path, dict.fromkeys(HOST, "nvme"), **keys) as engine:
            if not pressed:
                ways.append(run(engine, program, force=False))
                continue
            drawn = Drawn(machine, random.Random(seed), 512 << 10)
            with looked_at(engine._tier_manager.guard, drawn):
                ways.append(run(engine, program, force=True))
            assert engine.report().trials.kept + engine.report().trials.redone > 0
    assert repr(ways[0][0]) == repr(ways[1][0])  # some are NaN
    assert_same_bits(ways[0][1], ways[1][1])


@pytest.mark.slow
def test_what_is_given_up_costs_no_ram_and_comes_back(
    tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with offload.initialize(seeded(lambda: TinyLM(40)), config(tmp_path)) as engine:
        train(engine, 1)
        engine.settle()
        guard, pool = engine._tier_manager.guard, engine._tier_manager.pool
        guard.close()  # looks when the test says so
        before = pool.tier.touched_nbytes
        machine.has(-64 * MIB)
        with caplog.at_level(logging.INFO, "offload"):
            guard.look()
            guard.look()
        assert pool.limit_nbytes == 0
        assert pool.tier.touched_nbytes < before // 2
        seen = engine.report()
        assert seen.memory.given_back_nbytes > 0
        assert f"memory  {seen.memory}" in str(seen)
        (line,) = caplog.messages
        assert "RAM: 0 B of 1.0 GiB are left, 64.0 MiB should be: copies of states" in line
        machine.now = PLENTY
        guard.look()
        assert pool.limit_nbytes is None
        train(engine, 1)
        assert pool.tier.touched_nbytes > before // 2


def test_a_dispatched_model_answers_with_the_same_bits(tmp_path: Path, machine: Machine) -> None:
    model, tokens = seeded(TinyLM), batches(1)[0][:, :-1]
    with torch.no_grad():
        expected = model(tokens)
    offload.dispatch(model, config(tmp_path, {"parameters": "nvme"}))
    with torch.no_grad(), offload.dispatched(model) as tiers:
        machine.has(-64 * MIB)
        tiers._tier_manager.guard.look()
        assert torch.equal(model(tokens), expected)


@pytest.mark.slow
def test_a_model_that_is_dropped_while_copies_are_given_up_leaves_no_error(
    tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = batches(1)[0][:, :-1]
    for _ in range(10):
        model = seeded(TinyLM)
        offload.dispatch(model, config(tmp_path, {"parameters": "nvme"}))
        with torch.no_grad():
            model(tokens)
        machine.has(-(64 << 10))  # its thread looks again and again
        del model
        gc.collect()
    assert "the guard over memory" not in caplog.text
