"""What every `State` owes to the two sides that use it: one conformance class, which each kind of
state passes with each kind of home. A subclass says how a state is made."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.swap.device.device_slot import DeviceSlot, Links, OpenReads
from offload.swap.device.streams import CopyStream
from offload.swap.io.block_store import BlockStore
from offload.swap.io.swap_file import SwapFile
from offload.swap.io.threads_backend import ThreadsBackend
from offload.swap.states.cached_file_state import CachedFileState
from offload.swap.states.memory_state import MemoryState
from offload.swap.states.slot import Slot
from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import State
from offload.swap.threads.transfer import Transfer
from offload.tiers.errors import StateError, StorageError, TierFullError
from offload.tiers.file_tier import FileTier
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import Lease, MemoryTier
from offload.tiers.tier import PAGE_NBYTES, Residency, Tier
from offload.tiers.units import round_up

NBYTES = 10 * PAGE_NBYTES  # of a state
PIECE_NBYTES = 4 * PAGE_NBYTES  # the last piece is shorter
SLOTS = 3  # copies of states that the host's pool, or the device's, has room for
CPU = torch.device("cpu")


@dataclass
class Places:
    """Memory for homes, a pool of slots on the host and one on the device, and a file."""

    ledger: Ledger
    homes: MemoryTier
    host: SlotPool
    device: SlotPool
    store: BlockStore
    links: Links
    reads: OpenReads
    disk_fails: threading.Event
    disk_lags: threading.Event
    next_use: dict[str, float] = field(default_factory=dict)  # by name, 1.0 if it is not here

    def use_of(self, name: str) -> Callable[[], float]:
        return lambda: self.next_use.get(name, 1.0)

    def in_memory(
        self, name: str, nbytes: int = NBYTES, trainable: int | None = None,
        stride: int | None = None,
    ) -> MemoryState:  # fmt: skip
        lease = self.homes.lease(nbytes, owner=name, state_class=StateClass.PARAMETERS)
        spare = None if stride else SlotPool(self.homes, self.host.lock)
        return MemoryState(name, nbytes, PIECE_NBYTES, lease, trainable, stride, spare)

    def device_slot(self, name: str, nbytes: int = NBYTES) -> DeviceSlot:
        return DeviceSlot(
            name, nbytes, StateClass.PARAMETERS, self.device, self.use_of(name), self.links,
            self.reads,
        )  # fmt: skip

    def in_file(
        self, name: str, nbytes: int = NBYTES, trainable: int | None = None,
        stride: int | None = None,
    ) -> CachedFileState:  # fmt: skip
        slot = Slot(name, nbytes, StateClass.PARAMETERS, self.host, self.use_of(name))
        return CachedFileState(self.store, slot, PIECE_NBYTES, trainable, stride)


def make_places(folder: Path) -> Iterator[Places]:
    disk_fails, disk_lags = threading.Event(), threading.Event()

    def pwritev(fd: int, buffers: list[memoryview], offset: int) -> int:
        if disk_fails.is_set():
            raise OSError(5, os.strerror(5))
        if disk_lags.is_set():
            time.sleep(2e-3)
        return os.pwritev(fd, buffers, offset)

    ledger, lock, slots = Ledger(), threading.RLock(), SLOTS * NBYTES
    host = MemoryTier(Tier.HOST, slots, HostMemory(slots), ledger)
    device = MemoryTier(Tier.DEVICE, slots, HostMemory(slots), ledger)
    homes = MemoryTier(Tier.HOST, 1 << 20, HostMemory(1 << 20), Ledger())
    file, store_tier = SwapFile(folder), FileTier(8 << 20, [1.0], ledger)
    store = BlockStore(
        [file], store_tier, ThreadsBackend(pwritev=pwritev), lock=lock, growth_nbytes=1 << 20
    )
    links = Links(CopyStream(CPU), CopyStream(CPU), CPU)
    host_pool = SlotPool(host, lock)
    host_pool.await_progress = links.to_device.await_oldest  # a copy keeps its source
    yield Places(
        ledger, homes, host_pool, SlotPool(device, lock), store, links, OpenReads(CPU),
        disk_fails, disk_lags,
    )  # fmt: skip
    links.close()
    store.backend.close()
    file.close()
    ledger.check_integrity()


def content(seed: int, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), generator=generator, dtype=torch.uint8)


def slot_of(state: State) -> Any:
    """The slot that a state borrows; None if it borrows none."""
    return getattr(state, "slot", None)


def fill(state: State, values: torch.Tensor) -> None:
    state.host_blank().copy_(values)
    state.mark_host_dirty()


class StateConformance:
    has_blank = True  # False: the whole of it is filled from host memory
    is_undone_before_reads = False  # a speculative update, in whatever reads the state

    def make(self, places: Places, name: str) -> State:
        raise NotImplementedError

    def begin_update(self, state: State) -> None:
        """What a step does with a state before the update works on its pieces."""

    # ---------------------------------------------------------------- how each side works
    @pytest.fixture
    def places(self, tmp_path: Path) -> Iterator[Places]:
        yield from make_places(tmp_path)

    @pytest.fixture
    def filled(self, places: Places) -> Iterator[Callable[[int], State]]:
        """A factory of states filled with `content(seed)`; at the end all are closed."""
        made: list[State] = []

        def make(seed: int) -> State:
            made.append(self.make(places, f"state {seed}"))
            fill(made[-1], content(seed, made[-1].nbytes))
            return made[-1]

        yield make
        for state in made:
            state.close()

    def computed_with(self, state: State) -> torch.Tensor:
        """A copy of what the compute side reads."""
        view = state.tensor()
        return view.clone()

    def compute(self, state: State, values: torch.Tensor) -> None:
        """The compute side writes `values`."""
        view = state.tensor()
        view.copy_(values)
        state.mark_dirty()
        del view  # not before: a copy without views may be dropped

    def piece_of(self, state: State, piece: int) -> torch.Tensor:
        """A copy of what the update side reads."""
        span = state.span(piece)
        here = state.host_piece(piece)
        if here is not None:
            return here.wait().clone()
        staged = staging(span)
        state.read_piece(piece, staged).wait()
        return staged[: span.stop - span.start].clone()

    def update(self, state: State, piece: int, values: torch.Tensor) -> Transfer[None] | None:
        """The update side writes `values` to a piece: in place, or through memory of its own."""
        here = state.host_piece(piece)
        if here is not None:
            here.wait().copy_(values)
            del here
            state.mark_piece_dirty(piece)
            return None
        staged = staging(state.span(piece))
        staged[: values.numel()] = values
        return state.write_piece(piece, staged)

    def update_all(self, state: State, values: torch.Tensor) -> None:
        self.begin_update(state)
        writes = [self.update(state, p, values[state.span(p)]) for p in range(state.pieces)]
        for write in writes:
            if write is not None:
                write.wait()

    # ---------------------------------------------------------------- bytes
    def test_pieces_tile_the_buffer_in_order(self, filled: Callable[[int], State]) -> None:
        state = filled(1)
        spans = [state.span(piece) for piece in range(state.pieces)]
        assert spans[0].start == 0
        assert [span.stop for span in spans[:-1]] == [span.start for span in spans[1:]]
        assert spans[-1].stop == state.nbytes
        assert all(0 < span.stop - span.start <= state.piece_nbytes for span in spans)
        assert state.pieces > 1

    def test_what_the_host_wrote_is_read_on_every_side(
        self, filled: Callable[[int], State]
    ) -> None:
        state, expected = filled(1), content(1, filled(2).nbytes)
        view = state.tensor()
        assert (view.dtype, view.dim(), view.numel()) == (torch.uint8, 1, state.nbytes)
        del view
        assert torch.equal(self.computed_with(state), expected)
        assert torch.equal(state.host_tensor(), expected)
        for piece in range(state.pieces):
            assert torch.equal(self.piece_of(state, piece), expected[state.span(piece)])

    def test_what_the_model_wrote_is_read_on_every_side(
        self, filled: Callable[[int], State]
    ) -> None:
        state = filled(1)
        expected = content(2, state.nbytes)
        self.compute(state, expected)
        for piece in range(state.pieces):
            assert torch.equal(self.piece_of(state, piece), expected[state.span(piece)])
        assert torch.equal(self.computed_with(state), expected)
        assert torch.equal(state.host_tensor(), expected)

    def test_blank_memory_is_filled_without_being_read_or_refused_with_what_to_use(
        self, places: Places
    ) -> None:
        state = self.make(places, "fresh")
        if not self.has_blank:
            with pytest.raises(StateError, match=r"fresh is filled .*host_blank"):
                state.blank()
            state.close()
            return
        state.blank().copy_(content(3, state.nbytes))
        state.mark_dirty()
        assert torch.equal(self.computed_with(state), content(3, state.nbytes))
        state.close()

    def test_what_was_written_is_there_after_others_took_its_memory(
        self, filled: Callable[[int], State]
    ) -> None:
        state = filled(1)
        expected = content(2, state.nbytes)
        self.compute(state, expected)
        assert torch.equal(self.computed_with(state), expected)
        others = [filled(seed) for seed in range(3, 3 + 2 * SLOTS)]
        for other in others:
            other.tensor()
        assert torch.equal(self.computed_with(state), expected)

    # ---------------------------------------------------------------- the update side
    @pytest.mark.parametrize("is_in_memory", [True, False], ids=["in memory", "at home"])
    def test_an_update_piece_by_piece_is_what_the_model_computes_with_next(
        self, filled: Callable[[int], State], is_in_memory: bool
    ) -> None:
        state = filled(1)
        state.settle()
        if is_in_memory:
            state.tensor()
        elif slot_of(state) is not None and slot_of(state).held_nbytes:
            slot_of(state).evict()
        self.update_all(state, content(2, state.nbytes))
        assert torch.equal(self.computed_with(state), content(2, state.nbytes))
        assert torch.equal(state.host_tensor(), content(2, state.nbytes))

    def test_the_update_of_one_piece_leaves_the_others(
        self, filled: Callable[[int], State]
    ) -> None:
        state = filled(1)
        state.tensor()
        self.begin_update(state)
        expected = content(1, state.nbytes)
        span = state.span(1)
        expected[span] = 7
        write = self.update(state, 1, expected[span])
        if write is not None:
            write.wait()
        assert torch.equal(self.computed_with(state), expected)

    @pytest.mark.parametrize("reader", ["model", "update"])
    def test_of_several_versions_on_their_way_home_the_last_one_counts(
        self, places: Places, filled: Callable[[int], State], reader: str
    ) -> None:
        state = filled(1)
        state.settle()
        if slot_of(state) is not None and slot_of(state).held_nbytes:
            slot_of(state).evict()  # the update has memory of its own
        places.disk_lags.set()
        for version in range(2, 5):
            self.begin_update(state)
            values = content(version, state.nbytes)
            for piece in range(state.pieces):  # not waited for
                self.update(state, piece, values[state.span(piece)])
            if reader == "model":
                assert torch.equal(self.computed_with(state), values)
                continue
            for piece in reversed(range(state.pieces)):
                assert torch.equal(self.piece_of(state, piece), values[state.span(piece)])

    def test_pieces_brought_to_the_host_are_right_whether_there_was_room_or_not(
        self, filled: Callable[[int], State]
    ) -> None:
        states = [filled(seed) for seed in range(2 * SLOTS)]
        for seed, state in enumerate(states):
            state.prefetch_host(next_use=1.0)
            last = state.pieces - 1
            expected = content(seed, state.nbytes)[state.span(last)]
            assert torch.equal(self.piece_of(state, last), expected)

    @pytest.mark.parametrize("is_read", [False, True], ids=["unseen", "fetched meanwhile"])
    def test_what_was_written_speculatively_counts_or_never_was(
        self, filled: Callable[[int], State], is_read: bool
    ) -> None:
        state = filled(1)
        undoable = state.undoable()
        if undoable is None:
            assert state.at_home_on_device, "every other home has room for old versions"
            return
        held = content(1, state.nbytes)
        for version, keep in ((2, False), (3, True), (4, False)):
            values = held.clone()
            changed = slice(state.span(1).start, state.span(2).stop)  # the first piece stays
            values[changed] = content(version, state.nbytes)[changed]
            assert undoable.keep_old()
            self.begin_update(state)
            for piece in (1, 2):
                self.update(state, piece, values[state.span(piece)])
            if is_read and not self.is_undone_before_reads:  # a prefetch for the next forward
                state.settle()
                assert torch.equal(self.computed_with(state), values)
            (undoable.drop_old if keep else undoable.go_back)()
            held = values if keep else held
            assert torch.equal(self.computed_with(state), held)
            assert torch.equal(state.host_tensor(), held)
            for piece in range(state.pieces):
                assert torch.equal(self.piece_of(state, piece), held[state.span(piece)])

    def test_where_the_step_was_decided_before_its_update_began_no_old_version_is_kept(
        self, filled: Callable[[int], State]
    ) -> None:
        state = filled(1)
        undoable = state.undoable()
        if undoable is None:
            return
        for version in (2, 3):
            assert undoable.keep_old()
            undoable.drop_old()
            self.update_all(state, content(version, state.nbytes))
        assert undoable.keep_old()
        self.update_all(state, content(4, state.nbytes))
        undoable.go_back()
        assert torch.equal(self.computed_with(state), content(3, state.nbytes))

    # ---------------------------------------------------------------- memory
    def test_what_was_brought_is_computed_with(self, filled: Callable[[int], State]) -> None:
        state = filled(1)
        state.settle()
        assert state.prefetch(next_use=None)
        state.note_use()
        assert torch.equal(self.computed_with(state), content(1, state.nbytes))
        state.settle()
        assert state.residency() is Residency.CLEAN

    def test_values_survive_that_others_need_the_memory(
        self, filled: Callable[[int], State]
    ) -> None:
        states = [filled(seed) for seed in range(2 * SLOTS)]
        for _ in range(2):
            for seed, state in enumerate(states):
                assert torch.equal(self.computed_with(state), content(seed, state.nbytes))

    def test_a_view_keeps_its_values_while_others_come_and_go(
        self, filled: Callable[[int], State]
    ) -> None:
        view = filled(0).tensor()
        for seed in range(1, 2 * SLOTS):
            filled(seed).tensor()
        assert torch.equal(view, content(0, view.numel()))

    # ---------------------------------------------------------------- the end
    def test_a_settled_state_has_nothing_on_its_way(self, filled: Callable[[int], State]) -> None:
        state = filled(1)
        state.settle()
        assert state.residency() in (Residency.ABSENT, Residency.CLEAN)
        self.compute(state, content(2, state.nbytes))
        state.settle()
        assert state.residency() in (Residency.ABSENT, Residency.CLEAN)

    def test_a_discarded_state_is_filled_anew(self, filled: Callable[[int], State]) -> None:
        state = filled(1)
        state.tensor()
        state.discard()
        fill(state, content(2, state.nbytes))
        assert torch.equal(self.computed_with(state), content(2, state.nbytes))

    def test_a_closed_state_has_given_back_all_memory(self, places: Places) -> None:
        used = [account.used_nbytes for account in places.ledger.accounts.values()]
        state = self.make(places, "short-lived")
        fill(state, content(1, state.nbytes))
        state.tensor()
        state.close()
        places.links.to_device.close()  # what was on its way is there
        assert [account.used_nbytes for account in places.ledger.accounts.values()] == used
        assert places.homes.account.used_nbytes == 0


def staging(span: slice) -> torch.Tensor:
    """Whole pages of host memory, for the bytes of a piece."""
    nbytes = round_up(span.stop - span.start, PAGE_NBYTES)
    return HostMemory(nbytes).tensor(0, nbytes)


class InPlaceConformance(StateConformance):
    """A state that is computed with where it is at home."""

    def test_it_stays_where_it_is(self, filled: Callable[[int], State]) -> None:
        state = filled(0)
        assert state.in_place
        before = state.tensor().data_ptr()
        for seed in range(1, 2 * SLOTS):
            filled(seed).tensor()
        state.discard()
        assert state.prefetch(next_use=1e9)
        assert state.tensor().data_ptr() == before
        assert state.residency() is Residency.CLEAN


class BorrowingConformance(StateConformance):
    """A state that borrows slots of a pool."""

    def pool(self, places: Places) -> SlotPool:
        raise NotImplementedError

    def make(self, places: Places, name: str) -> State:
        raise NotImplementedError

    def take_all(self, places: Places) -> list[Lease]:
        """All of the pool's memory, for something else."""
        pool, leases = self.pool(places), []
        for _ in range(SLOTS):
            lease = pool.offer(NBYTES, "something else", StateClass.STAGING, next_use=-1.0)
            if lease is not None:
                leases.append(lease)
        return leases

    def test_without_room_a_prefetch_says_no_and_a_demand_says_what_is_missing(
        self, places: Places, filled: Callable[[int], State]
    ) -> None:
        state = filled(1)
        state.tensor()
        state.settle()
        slot_of(state).evict()
        leases = self.take_all(places)
        assert not state.prefetch(next_use=1.0)
        assert state.residency() is Residency.ABSENT
        for use in (lambda: state.prefetch(next_use=None), state.tensor):
            with pytest.raises(TierFullError, match=r"tier full: state 1 needs .*raise budget\."):
                use()
        for lease in leases:
            lease.free()
        assert torch.equal(self.computed_with(state), content(1, state.nbytes))

    def test_a_prefetch_takes_the_place_of_what_is_used_later_alone(
        self, places: Places, filled: Callable[[int], State]
    ) -> None:
        held = [filled(seed) for seed in range(SLOTS)]
        for state in held:
            state.tensor()
            state.settle()
        fresh = filled(SLOTS)
        fresh.settle()
        if fresh.residency() is not Residency.ABSENT:
            slot_of(fresh).evict()
        for number, state in enumerate(held):
            state.tensor()  # the one that made room for the fresh one is back
            state.settle()
            places.next_use[state.name] = 2.0 + number
        assert not fresh.prefetch(next_use=9.0)
        assert fresh.prefetch(next_use=1.0)
        there = [state.residency() is not Residency.ABSENT for state in held]
        assert there == [*[True] * (SLOTS - 1), False]

    def test_a_dropped_copy_is_gone_and_cannot_be_dropped_or_written(
        self, filled: Callable[[int], State]
    ) -> None:
        state = filled(1)
        state.tensor()
        state.settle()
        slot = slot_of(state)
        assert slot.held_nbytes == round_up(state.nbytes, PAGE_NBYTES)
        slot.evict()
        assert slot.held_nbytes == 0
        assert state.residency() is Residency.ABSENT
        with pytest.raises(StateError, match="state 1 holds no"):
            slot.evict()
        with pytest.raises(StateError, match="state 1 holds no"):
            state.mark_dirty()
        assert torch.equal(self.computed_with(state), content(1, state.nbytes))


class FileHomeConformance(StateConformance):
    """A state whose home is a file, directly or behind another state."""

    def test_what_was_never_written_cannot_be_read(self, places: Places) -> None:
        state = self.make(places, "fresh")
        with pytest.raises(StateError, match=r"fresh.* is read before it was ever written"):
            state.tensor()
        with pytest.raises(StateError, match=r"fresh.* is read before it was ever written"):
            state.read_piece(1, staging(state.span(1))).wait()

    def test_a_failed_write_is_raised_by_its_waiter_and_by_each_later_use(
        self, places: Places
    ) -> None:
        state = self.make(places, "precious")
        fill(state, content(1, state.nbytes))
        state.settle()
        self.begin_update(state)
        places.disk_fails.set()
        write = self.update(state, 1, content(2, state.nbytes)[state.span(1)])
        with pytest.raises(StorageError, match="EIO"):
            state.settle() if write is None else write.wait()
        room = staging(state.span(0))
        for use in (
            state.settle, lambda: state.host_piece(0), lambda: state.read_piece(0, room),
        ):  # fmt: skip
            with pytest.raises(StorageError, match="EIO"):
                use()
