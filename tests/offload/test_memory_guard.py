"""Whatever memory the machine has left while an engine trains, the bits are the same; how much is
given up, and when it is said."""

from __future__ import annotations

import gc
import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload.memory.memory_guard import Headroom, MemoryGuard
from offload.swap.states.slot_pool import SlotPool
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import Lease, MemoryTier
from offload.tiers.tier import Tier
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


# ---------------------------------------------------------------- how much is given up, and said
BUDGET = 16 * MIB


class Copy:
    """A clean copy of 1 MiB, whose pages are touched."""

    def __init__(self, pool: SlotPool, next_use: float) -> None:
        self.name = f"copy {next_use}"
        self._pool, self._next_use = pool, next_use
        with pool.lock:
            lease = pool.offer(MIB, self.name, StateClass.PARAMETERS, next_use=next_use)
            assert lease is not None
            lease.tensor.fill_(1)
            self.lease: Lease | None = lease
            pool.register(self)

    @property
    def held_nbytes(self) -> int:
        return 0 if self.lease is None else self.lease.extent.nbytes

    def next_use(self) -> float:
        return self._next_use

    def can_evict(self) -> bool:
        return self.lease is not None and not self.lease.in_use()

    def evict(self) -> None:
        assert self.lease is not None
        self._pool.unregister(self)
        self.lease.free()
        self.lease = None

    def write_back(self) -> None: ...
    def transit(self) -> Callable[[], None] | None:
        return None


def settle(guard: MemoryGuard) -> None:
    """Look until nothing more is given up, as its thread does."""
    before = -1
    while guard.report().given_back_nbytes > before:
        before = guard.report().given_back_nbytes
        guard.look()


class Ram:
    """RAM of which so much is left; of the tier what it takes is taken of that."""

    def __init__(self, tier: MemoryTier, reserve: int = 2 * MIB) -> None:
        self.tier, self.reserve = tier, reserve
        self.others = 0
        self.nbytes = 32 * MIB

    def __call__(self) -> list[Headroom]:
        left = max(0, self.nbytes - self.others - self.tier.touched_nbytes)
        return [Headroom("RAM", self.nbytes, left, self.reserve)]


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    tier = MemoryTier(Tier.HOST, BUDGET, HostMemory(BUDGET), Ledger())
    yield SlotPool(tier, threading.RLock())
    tier.close()


@pytest.fixture
def copies(pool: SlotPool) -> list[Copy]:
    return [Copy(pool, number) for number in range(1, 13)]


@pytest.fixture
def ram(pool: SlotPool) -> Ram:
    return Ram(pool.tier)


def test_the_limit_rises_by_half_of_what_is_left_at_a_time(
    pool: SlotPool, copies: list[Copy], ram: Ram
) -> None:
    guard = MemoryGuard(pool, ram)
    ram.others = 25 * MIB
    settle(guard)
    assert pool.limit_nbytes == 5 * MIB
    ram.others = 20 * MIB
    guard.look()
    assert pool.limit_nbytes == 5 * MIB + 5 * MIB // 2
    ram.others = 0
    guard.look()
    assert pool.limit_nbytes is None


def test_pinned_memory_grows_no_more_and_its_copies_stay(
    pool: SlotPool, copies: list[Copy], ram: Ram, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(pool.tier._memory, "gives_back", False)
    for copy in copies[:2]:
        copy.evict()
    ram.others = 32 * MIB
    guard = MemoryGuard(pool, ram)
    settle(guard)
    assert all(copy.lease is not None for copy in copies[2:])
    assert pool.limit_nbytes == pool.tier.touched_nbytes == 12 * MIB
    assert pool.offer(2 * MIB, "in place", StateClass.PARAMETERS, next_use=0.5) is not None
    assert pool.offer(5 * MIB, "more", StateClass.PARAMETERS, next_use=0.5) is not None
    assert pool.tier.arena.used_nbytes <= 12 * MIB
    assert (
        "is pinned, and grows no more (the host tier takes 12.0 MiB of 16.0 MiB now)" in caplog.text
    )


def test_a_reading_that_fails_ends_nothing(
    pool: SlotPool, ram: Ram, caplog: pytest.LogCaptureFixture
) -> None:
    asked = threading.Semaphore(0)

    def read() -> list[Headroom]:
        asked.release()
        raise OSError("proc is gone")

    guard = MemoryGuard(pool, read)
    guard.start()
    asked.acquire(timeout=60)
    asked.acquire(timeout=60)
    guard.close()
    assert "the guard over memory goes on" in caplog.text
