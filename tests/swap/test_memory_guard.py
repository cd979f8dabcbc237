"""The guard: how much is given up, when it is said, when the next forward is refused."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator

import pytest

from offload.swap.states.slot_pool import SlotPool
from offload.swap.threads import memory_guard
from offload.swap.threads.memory_guard import Headroom, MemoryGuard
from offload.tiers.errors import LowMemoryError
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

    def can_drop(self) -> bool:
        return self.lease is not None and not self.lease.in_use()

    def drop(self) -> None:
        assert self.lease is not None
        self._pool.unregister(self)
        self.lease.free()
        self.lease = None

    def leave(self) -> None: ...
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
        return [Headroom("RAM", self.nbytes, left, left, self.reserve)]


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


def test_what_is_given_up_is_what_is_missing_and_is_needed_last(
    pool: SlotPool, copies: list[Copy], machine: Machine
) -> None:
    guard = MemoryGuard(pool, machine)
    guard.look()
    assert all(copy.lease is not None for copy in copies)
    assert pool.limit_nbytes is None or pool.limit_nbytes > pool.tier.arena.used_nbytes
    machine.others = 18 * MIB + 1  # 12 are taken, and 2 should be left
    guard.look()
    assert [copy.lease is None for copy in copies] == [False] * 11 + [True]
    assert pool.tier.touched_nbytes == 11 * MIB
    assert machine()[0].spare_nbytes >= 0
    assert guard.report().given_back_nbytes == MIB
    guard.look()  # it is enough now
    assert guard.report().times == 1


def test_free_pages_go_before_any_copy(
    pool: SlotPool, copies: list[Copy], machine: Machine
) -> None:
    for copy in copies[:6]:
        copy.drop()
    assert pool.tier.touched_nbytes == 12 * MIB
    machine.others = 20 * MIB
    MemoryGuard(pool, machine).look()
    assert all(copy.lease is not None for copy in copies[6:])
    assert pool.tier.touched_nbytes == 6 * MIB


def test_under_a_limit_nothing_is_fetched_ahead_and_what_is_needed_gets_its_lease(
    pool: SlotPool, copies: list[Copy], machine: Machine
) -> None:
    machine.others = 26 * MIB
    settle(MemoryGuard(pool, machine))
    assert pool.limit_nbytes == pool.tier.arena.used_nbytes == 4 * MIB
    assert pool.offer(MIB, "ahead", StateClass.PARAMETERS, next_use=50.0) is None
    needed = pool.demand(3 * MIB, "now", StateClass.PARAMETERS)  # in the place of copies
    assert pool.tier.arena.used_nbytes == 4 * MIB
    more = pool.demand(10 * MIB, "now, too", StateClass.PARAMETERS)  # beyond the limit
    with pool.lock:
        needed.free()
        more.free()


def test_what_is_used_now_stays_below_any_limit(pool: SlotPool, machine: Machine) -> None:
    now, later, seen = Copy(pool, -1.0), Copy(pool, 3.0), Copy(pool, 5.0)
    assert seen.lease is not None
    view = seen.lease.tensor[:10]
    machine.others = 32 * MIB
    guard = MemoryGuard(pool, machine)
    assert guard.look() is not None
    assert (now.lease is None, later.lease is None, seen.lease is None) == (False, True, False)
    assert view.tolist() == [1] * 10


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


@pytest.mark.parametrize("seed", range(5))
def test_others_that_take_and_leave_find_the_reserve_whole_and_the_books_balance(
    pool: SlotPool, machine: Machine, seed: int
) -> None:
    drawn, guard = random.Random(seed), MemoryGuard(pool, machine)
    copies: list[Copy] = []
    for _ in range(300):
        machine.others = drawn.randint(0, 29 * MIB)
        settle(guard)
        copies = [copy for copy in copies if copy.lease is not None]
        assert machine()[0].spare_nbytes >= 0
        for _ in range(drawn.randrange(4)):
            with pool.lock:
                if pool.tier.fits(MIB) and (pool.limit_nbytes is None or drawn.random() < 0.2):
                    machine.others = 0
                    guard.look()
                    copies.append(Copy(pool, drawn.uniform(1, 99)))
        for copy in copies:
            assert copy.lease is None or bool((copy.lease.tensor == 1).all())
        if copies and drawn.random() < 0.5:
            with pool.lock:
                copies.pop().drop()
        pool.tier.arena.check()


def test_one_line_says_that_copies_go_and_one_that_there_is_room_again(
    pool: SlotPool, copies: list[Copy], machine: Machine, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    guard = MemoryGuard(pool, machine)
    with caplog.at_level(logging.INFO, "offload"):
        for others in (20, 22, 24):
            machine.others = others * MIB
            guard.look()
        machine.others = 0
        guard.look()
        assert len(caplog.messages) == 1
        monkeypatch.setattr(memory_guard, "_CALM_S", 0.0)
        guard.look()
        guard.look()
    first, last = caplog.messages
    assert first.startswith("RAM: 0 B of 32.0 MiB are left, 2.0 MiB should be: copies of states")
    assert "the host tier takes 10.0 MiB of 16.0 MiB now" in first
    assert last == (
        "RAM: 26.0 MiB of 32.0 MiB are left: copies of states may take 16.0 MiB of the host tier's "
        "16.0 MiB again"
    )


def test_a_forward_is_refused_only_while_nothing_is_left_to_give_up(
    pool: SlotPool, copies: list[Copy], machine: Machine
) -> None:
    guard = MemoryGuard(pool, machine)
    machine.others = 32 * MIB
    guard.look()
    guard.check()
    assert any(copy.lease is not None for copy in copies)
    settle(guard)
    assert all(copy.lease is None for copy in copies)
    with pytest.raises(LowMemoryError, match=r"RAM: 0 B of 32\.0 MiB are left, the kernel may"):
        guard.check()
    machine.others = 31 * MIB  # less than the reserve, and yet enough
    guard.check()


def test_swap_and_a_limit_that_only_slows_are_no_reason_to_refuse(
    pool: SlotPool, machine: Machine
) -> None:
    here = Headroom("cgroup", 32 * MIB, 0, 8 * MIB, 2 * MIB)
    guard = MemoryGuard(pool, lambda: [machine()[0], here])
    assert guard.look() is None
    assert pool.limit_nbytes == 0
    assert guard.report().where == "cgroup"


def test_pinned_memory_grows_no_more_and_its_copies_stay(
    pool: SlotPool, copies: list[Copy], machine: Machine, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(HostMemory, "gives_back", False)
    for copy in copies[:2]:
        copy.drop()
    machine.others = 32 * MIB
    guard = MemoryGuard(pool, machine)
    settle(guard)
    assert all(copy.lease is not None for copy in copies[2:])
    assert pool.limit_nbytes == pool.tier.touched_nbytes == 12 * MIB
    assert pool.offer(2 * MIB, "in place", StateClass.PARAMETERS, next_use=0.5) is not None
    assert pool.offer(5 * MIB, "more", StateClass.PARAMETERS, next_use=0.5) is not None
    assert pool.tier.arena.used_nbytes <= 12 * MIB
    with pytest.raises(LowMemoryError):
        guard.check()
    assert (
        "the host tier is pinned, and grows no more (it takes 12.0 MiB of 16.0 MiB now)"
        in caplog.text
    )


def test_several_processes_let_their_copies_grow_by_a_share_each(
    pool: SlotPool, machine: Machine
) -> None:
    machine.others = 26 * MIB
    MemoryGuard(pool, machine, sharing=4).look()  # the tier takes nothing yet
    assert pool.limit_nbytes == (32 - 26 - 2) * MIB // 2 // 4


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
