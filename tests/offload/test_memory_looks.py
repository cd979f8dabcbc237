"""The guard: how much is given up, and when it is said."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from offload.memory.memory_guard import Headroom, MemoryGuard
from offload.swap.states.slot_pool import SlotPool
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import Lease, MemoryTier
from offload.tiers.tier import Tier

MIB = 1 << 20
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


class Machine:
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
def machine(pool: SlotPool) -> Machine:
    return Machine(pool.tier)


def test_the_limit_rises_by_half_of_what_is_left_at_a_time(
    pool: SlotPool, copies: list[Copy], machine: Machine
) -> None:
    guard = MemoryGuard(pool, machine)
    machine.others = 25 * MIB
    settle(guard)
    assert pool.limit_nbytes == 5 * MIB
    machine.others = 20 * MIB
    guard.look()
    assert pool.limit_nbytes == 5 * MIB + 5 * MIB // 2
    machine.others = 0
    guard.look()
    assert pool.limit_nbytes is None


def test_pinned_memory_grows_no_more_and_its_copies_stay(
    pool: SlotPool, copies: list[Copy], machine: Machine, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(pool.tier._memory, "gives_back", False)
    for copy in copies[:2]:
        copy.evict()
    machine.others = 32 * MIB
    guard = MemoryGuard(pool, machine)
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
    pool: SlotPool, machine: Machine, caplog: pytest.LogCaptureFixture
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
