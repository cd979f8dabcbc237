"""State at home in a file: residency, eviction, versions, failures."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from offload.swap.io.block_store import BlockStore
from offload.swap.io.swap_file import SwapFile
from offload.swap.io.threads_backend import ThreadsBackend
from offload.swap.states.cached_file_state import CachedFileState
from offload.swap.states.slot import Slot
from offload.swap.states.slot_pool import SlotPool
from offload.tiers.errors import StateError, StorageError, TierFullError
from offload.tiers.file_tier import FileTier
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import MemoryTier
from offload.tiers.tier import Residency, Tier

PAGE = 4096


@dataclass
class Bench:
    """A store and a pool of `slots` pages of memory."""

    store: BlockStore
    pool: SlotPool
    ledger: Ledger
    next_use: dict[str, float] = field(default_factory=dict)

    def state(
        self, name: str, nbytes: int = PAGE, piece_nbytes: int = PAGE,
        kind: StateClass = StateClass.PARAMETERS,
    ) -> CachedFileState:  # fmt: skip
        self.next_use[name] = 0.0
        slot = Slot(name, nbytes, kind, self.pool, lambda: self.next_use[name])
        return CachedFileState(self.store, slot, piece_nbytes)

    def filled(self, name: str, value: int, nbytes: int = PAGE) -> CachedFileState:
        state = self.state(name, nbytes)
        state.blank().fill_(value)
        state.mark_dirty()
        state.settle()
        return state


@pytest.fixture
def bench(tmp_path) -> Iterator[Bench]:
    yield from make_bench(tmp_path, ThreadsBackend())


def make_bench(tmp_path, backend, file_pages=64, slots=4) -> Iterator[Bench]:
    lock, ledger = threading.RLock(), Ledger()
    host = MemoryTier(Tier.HOST, slots * PAGE, HostMemory(slots * PAGE), ledger)
    tier = FileTier(file_pages * PAGE, [1.0], ledger)
    store = BlockStore([SwapFile(tmp_path)], tier, backend, lock=lock)
    yield Bench(store, SlotPool(host, lock), ledger)
    store.backend.close()
    for file in store.files:
        file.close()


def writes_held(tmp_path) -> Iterator[tuple[Bench, threading.Event]]:
    """Writes wait while the event is not set."""
    held = threading.Event()

    def pwritev(fd, buffers, offset):
        assert held.wait(10)
        return os.pwritev(fd, buffers, offset)

    held.set()
    for bench in make_bench(tmp_path, ThreadsBackend(pwritev=pwritev)):
        yield bench, held


def test_a_write_without_a_view_is_refused(bench):
    """Between the last view of it and `mark_dirty`, another thread may have dropped it."""
    state = bench.filled("s", 1)
    view = state.tensor()
    view.fill_(2)
    del view
    with pytest.raises(StateError, match="s: written without a view of its slot"):
        state.mark_dirty()
    view = state.tensor()
    view.fill_(3)
    state.mark_dirty()
    del view
    assert state.tensor().unique().tolist() == [3]


def test_a_slot_that_a_read_could_not_begin_to_fill_is_not_taken_for_values(bench, monkeypatch):
    state = bench.filled("s", 1, 2 * PAGE)
    state.slot.evict()
    read, begun = bench.store.read, []

    def read_once(*args, **keys):
        begun.append(args)
        if len(begun) > 1:
            raise StateError("closed")
        return read(*args, **keys)

    monkeypatch.setattr(bench.store, "read", read_once)
    for _ in range(2):
        with pytest.raises(StateError, match="closed"):
            state.tensor()
    monkeypatch.undo()
    state.slot.evict()
    assert state.tensor().unique().tolist() == [1]


def test_a_write_of_one_update_that_ends_in_the_next_one_is_not_gone_back_behind(tmp_path):
    for bench, held in writes_held(tmp_path):
        state = bench.filled("a", 1)
        state.slot.evict()
        one, two = (HostMemory(PAGE).tensor(0, PAGE).fill_(value) for value in (2, 3))
        state.keep_old()
        held.clear()
        state.write_piece(0, one)
        state.drop_old()
        state.keep_old()
        held.set()
        state.settle()
        state.write_piece(0, two)
        state.go_back()
        assert state.tensor().unique().tolist() == [2]
        assert len(bench.store._records) == 1


def test_a_failed_write_surfaces_and_the_old_version_stays(tmp_path):
    failing = threading.Event()

    def pwritev(fd, buffers, offset):
        if failing.is_set():
            raise OSError(5, os.strerror(5))
        return os.pwritev(fd, buffers, offset)

    for bench in make_bench(tmp_path, ThreadsBackend(pwritev=pwritev)):
        state = bench.filled("precious", 1)
        failing.set()
        state.blank().fill_(2)
        state.mark_dirty()
        with pytest.raises(StorageError, match=r"precious|write"):
            state.settle()
        with pytest.raises(StorageError):
            state.prefetch(next_use=None)
        assert bench.ledger.accounts[Tier.NVME].used_nbytes == PAGE


@pytest.mark.parametrize("threaded", [False, True])
def test_a_read_waits_for_the_staged_write_of_a_newer_version(tmp_path, threaded):
    """Right after a step on nvme its chunks are still on their way home from staging memory: what
    the file holds under their name until then is the version before."""
    for bench, held in writes_held(tmp_path):
        state = bench.filled("record", 1)
        state.slot.evict()
        held.clear()
        staged = HostMemory(PAGE).tensor(0, PAGE)
        written = state.write_piece(0, staged.fill_(2))
        assert not state.prefetch(next_use=1.0), "a prefetch does not wait"
        assert state.residency() is Residency.ABSENT
        release = threading.Timer(0.1 if threaded else 0.0, held.set)
        release.start()
        if not threaded:
            release.join()
        assert state.tensor().unique().tolist() == [2]
        written.wait()
        release.join()
        bench.ledger.check_integrity()


def test_concurrent_readers_of_a_pool_that_is_too_small_all_see_their_own_bytes(bench):
    states = [bench.filled(str(i), i, 2 * PAGE) for i in range(5)]
    wrong: list[int] = []

    def read(number: int) -> None:
        for _ in range(30):
            if states[number].tensor().unique().tolist() != [number]:
                wrong.append(number)

    # one reader at a time holds a view of at most one slot: two slots suffice for two readers
    threads = [threading.Thread(target=read, args=(number,)) for number in (1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert wrong == []


def test_a_full_file_tier_waits_for_versions_that_are_being_replaced(tmp_path):
    def slow_pwritev(fd, buffers, offset):
        time.sleep(0.02)
        return os.pwritev(fd, buffers, offset)

    backend = ThreadsBackend(pwritev=slow_pwritev, workers=2)
    for bench in make_bench(tmp_path, backend, file_pages=5):
        states = [bench.filled(str(number), number) for number in range(4)]
        for round_ in range(3):  # four pages at home, room for one new version at a time
            for number, state in enumerate(states):
                state.blank().fill_(10 * round_ + number)
                state.mark_dirty()
        for number, state in enumerate(states):
            state.settle()
            assert torch.equal(state.tensor(), torch.full((PAGE,), 20 + number, dtype=torch.uint8))
        bench.ledger.check_integrity()


def test_a_file_tier_that_nothing_will_free_says_that_it_is_full(tmp_path):
    for bench in make_bench(tmp_path, ThreadsBackend(), file_pages=2):
        kept = [bench.filled(str(number), number) for number in range(2)]
        state = bench.state("one too many")
        state.blank()
        with pytest.raises(TierFullError, match=r"budget\.nvme"):
            state.mark_dirty()
        assert len(kept) == 2
