"""State whose home is a file: pieces in versioned extents, at times a copy in a slot of memory.

                prefetch              arrivals done
    ABSENT ───────────────▶ ARRIVING ───────────────▶ CLEAN ──evict──▶ ABSENT
                                                      ▲   │ mark_dirty
                                         writes done  │   ▼
                                     LEAVING ◀─write_back─ DIRTY

The states are not stored but follow from what is in flight, so they cannot disagree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.swap.io.block_store import BlockStore, StoredBlock
from offload.swap.io.io_backend import Priority
from offload.swap.states.slot import SlotState
from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import HostPiece, Snapshot
from offload.swap.threads.shield import defer_signals, interrupted_in_waits
from offload.swap.threads.transfer import Failure, Transfer, all_of, is_stuck
from offload.tiers.errors import StateError, TierFullError
from offload.tiers.ledger import OldBytes, StateClass
from offload.tiers.tier import PAGE_NBYTES, Residency
from offload.tiers.units import round_up


class FileState(SlotState):
    """A flat buffer at home in a `BlockStore`. Thread-safe: the pool's lock guards its fields."""

    can_snapshot = True

    def __init__(
        self, name: str, nbytes: int, piece_nbytes: int, state_class: StateClass,
        store: BlockStore, pool: SlotPool, next_use: Callable[[], float],
        edge_nbytes: int | None = None, stride_nbytes: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, nbytes, piece_nbytes, pool, next_use, edge_nbytes, stride_nbytes)
        inner = [self.span(piece).start for piece in range(self.pieces)]
        if any(start % PAGE_NBYTES for start in inner):
            raise ValueError(f"{name}: pieces of {piece_nbytes} bytes would share pages")
        self._class = state_class
        self._store = store
        self._blocks: list[StoredBlock | None] = [None] * self.pieces
        self._arrivals: dict[int, Transfer[None]] = {}
        self._writes: dict[int, Transfer[Any]] = {}
        self._dirty: set[int] = set()
        self._filling = False  # between `blank` and `mark_dirty`: neither dropped nor sent home
        self._being_sent = False  # some thread is in `write_back`
        self._failure: Failure | None = None
        self._old: dict[int, StoredBlock] | None = None  # of pieces written since `keep_old`

    # ---------------------------------------------------------------- what the pool asks
    def can_evict(self) -> bool:
        slot = self._slot
        if slot is None or self._filling or self._dirty or self._writes:
            return False
        if self._failure is not None:
            return False
        return all(arrival.done() for arrival in self._arrivals.values()) and not slot.in_use()

    def _forget_arrival(self) -> None:
        self._arrivals.clear()

    def _may_still_be_filled(self) -> bool:
        return any(is_stuck(arrival) for arrival in self._arrivals.values())

    @defer_signals
    def write_back(self) -> None:
        """Start taking every dirty piece home; gradients only while no view of them is alive."""
        with self._lock:
            if self._class is StateClass.GRADIENTS and self._slot and self._slot.in_use():
                return
            if self._being_sent:  # another thread waits in `_write_back`, without the lock
                self._store.await_room()
                return
            self._being_sent = True
            try:
                while self._dirty:
                    piece = min(self._dirty)
                    self._write_back(piece, self._slot_pages(piece))
                    self._dirty.discard(piece)  # not before: a dirty copy is not dropped
            finally:
                self._being_sent = False

    def transit(self) -> Callable[[], object] | None:
        with self._lock:
            moving = [*self._arrivals.values(), *self._writes.values()]
            pending = [transfer for transfer in moving if not transfer.done()]
        if not pending:
            return None
        return lambda: all_of(pending).wait()

    # ---------------------------------------------------------------- compute side
    def residency(self) -> Residency:
        with self._lock:
            if self._slot is None:
                return Residency.ABSENT
            if self._filling or self._dirty:
                return Residency.DIRTY
            if self._writes:
                return Residency.LEAVING
            if not all(arrival.done() for arrival in self._arrivals.values()):
                return Residency.ARRIVING
            return Residency.CLEAN

    def prefetch(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        self._raise_failure()
        if self._slot is not None:  # without the lock: no less true than just after it
            return True
        return self._take_slot(next_use, fill=priority)

    @interrupted_in_waits
    def _take_slot(self, next_use: float | None, fill: Priority | None) -> bool:
        """Lease a slot and, with `fill`, start reading into it. False where there is no room."""
        if fill is not None and None in self._blocks:
            raise StateError(f"{self.name} is read before it was ever written")
        while leaving := self._staged_writes(fill):
            if next_use is not None:
                return False
            all_of(leaving).wait()
        lease = self._lease_slot(next_use, self._class)
        if lease is None:
            return False
        with self._lock:
            if self._slot is not None:  # another thread was faster
                lease.free()
                return True
            if self._staged_writes(fill):  # one has just begun
                lease.free()
                return next_use is None and self._take_slot(next_use, fill)
            self._slot = lease
            self._pool.register(self)
            if fill is not None:
                for piece in range(self.pieces):
                    self._arrivals[piece] = self._read(piece, self._slot_pages(piece), fill)
        return True

    def _staged_writes(self, fill: Priority | None) -> list[Transfer[None]]:
        """The writes of staged pieces under way, if a read is asked for: the home has their old
        version until then."""
        with self._lock:
            return [] if fill is None else list(self._writes.values())

    @interrupted_in_waits
    def tensor(self) -> torch.Tensor:
        while True:
            self.prefetch(next_use=None, priority=Priority.URGENT)
            with self._lock:
                slot, arrivals = self._slot, list(self._arrivals.values())
                if slot is not None and all(a.done() and a.failure is None for a in arrivals):
                    self._arrivals.clear()
                    return slot.tensor[: self.nbytes]
            all_of(arrivals).wait()
            # it may be dropped between its arrival and a view of it: bring it again

    @defer_signals
    def blank(self) -> torch.Tensor:
        self._raise_failure()
        while True:
            with self._lock:
                slot = self._slot
                if slot is not None:
                    view = slot.tensor[: self.nbytes]
                    waits = [*self._arrivals.values(), *self._writes.values()]
                    self._filling = True
                    self._dirty.clear()
                    break
            self._take_slot(None, fill=None)
        all_of(waits).wait()
        return view

    @defer_signals
    def mark_dirty(self, *, to_edge: bool = False) -> None:
        with self._lock:
            if self._slot is None:
                raise StateError(f"{self.name} holds no memory that could have been written")
            if not self._filling and not self._slot.in_use():
                raise StateError(
                    f"{self.name}: nobody has a view of what was written, so it may have been "
                    "dropped meanwhile"
                )
            all_of_it = self._filling or not to_edge
            changed = range(self.pieces if all_of_it else self._pieces_to_edge)
            self._dirty.update(changed)  # first: a dirty copy is not dropped
            self._filling = False
            if self._class is StateClass.GRADIENTS:
                self._pool.may_write_back(self)
                return
            leaving = list(self._writes.values())
        all_of(leaving).wait()  # a piece has one write on its way at a time
        self.write_back()

    # ---------------------------------------------------------------- update side
    @defer_signals
    def host_piece(self, piece: int) -> HostPiece | None:
        self._raise_failure()
        with self._lock:
            if self._slot is None:
                return None
            moving = (self._arrivals.get(piece), self._writes.get(piece))
            view = self._slot.tensor[self.span(piece)]
            return HostPiece(view, tuple(transfer for transfer in moving if transfer is not None))

    @defer_signals
    def mark_piece_dirty(self, piece: int) -> None:
        with self._lock:
            self._write_back(piece, self._slot_pages(piece))

    @interrupted_in_waits
    def read_piece(self, piece: int, destination: torch.Tensor) -> Transfer[None]:
        self._raise_failure()
        with self._lock:
            before = self._writes.get(piece)
        if before is not None:
            before.wait()
        with self._lock:
            if self._blocks[piece] is None:
                raise StateError(f"{self.name}: piece {piece} is read before it was ever written")
            return self._read(piece, self._staged_pages(piece, destination), Priority.NORMAL)

    @defer_signals
    def write_piece(self, piece: int, source: torch.Tensor) -> Transfer[None]:
        self._raise_failure()
        with self._lock:
            return self._write_back(piece, self._staged_pages(piece, source))

    # ---------------------------------------------------------------- an update on trial
    def undoable(self) -> FileState:
        return self

    @property
    def old_nbytes(self) -> OldBytes:
        return OldBytes(files=round_up(self.nbytes, PAGE_NBYTES) + self.pieces * PAGE_NBYTES)

    def has_views(self) -> bool:
        with self._lock:
            return self._slot is not None and self._slot.in_use()

    def keep_old(self) -> bool:
        with self._lock:
            self._old = {}
        return True

    @defer_signals
    def drop_old(self) -> None:
        with self._lock:
            old, self._old = self._old, None
            for block in (old or {}).values():
                self._store.free(block)

    @defer_signals
    def go_back(self) -> None:
        self.settle()
        with self._lock:
            old, self._old = self._old or {}, None
            for piece, block in old.items():
                written, self._blocks[piece] = self._blocks[piece], block
                assert written is not None, "it has an old version"
                self._store.free(written)
            if old and self._slot is not None:
                if self.can_evict():
                    self.evict()
                else:  # a view that was kept shows the valid bytes
                    for piece in old:
                        pages = self._slot_pages(piece)
                        self._arrivals[piece] = self._read(piece, pages, Priority.NORMAL)

    # ---------------------------------------------------------------- a save in the background
    @defer_signals
    def snapshot(self) -> Snapshot:
        self.write_back()
        self.settle()
        with self._lock:
            blocks = [block for block in self._blocks if block is not None]
            if len(blocks) < self.pieces:
                raise StateError(f"{self.name} is saved before it was ever written")
            return FileSnapshot(self._store, blocks)

    # ---------------------------------------------------------------- both
    @defer_signals
    def discard(self) -> None:
        try:
            self.settle()
        finally:  # what failed has ended, too, and its memory is given back
            self._forget()

    def _forget(self) -> None:
        with self._lock:
            self._dirty.clear()
            self._filling = False
            if self._slot is not None:
                self.evict()
            for block in self._blocks:
                if block is not None:
                    self._store.free(block)
            self._blocks = [None] * self.pieces
            self.drop_old()

    @interrupted_in_waits
    def settle(self) -> None:
        while True:
            with self._lock:
                pending = [*self._arrivals.values(), *self._writes.values()]
                being_sent = self._being_sent
            all_of(pending).wait()
            if not being_sent:
                break
            self._store.await_room()
        self._raise_failure()

    def close(self) -> None:
        self.discard()

    # ---------------------------------------------------------------- moves
    def _slot_pages(self, piece: int) -> memoryview:
        """The piece's whole pages in the slot: what direct I/O moves."""
        assert self._slot is not None, "a piece of a slot that is not held"
        span = self.span(piece)
        return self._slot.pages(span.start, round_up(span.stop, PAGE_NBYTES))

    def _staged_pages(self, piece: int, staged: torch.Tensor) -> memoryview:
        span = self.span(piece)
        nbytes = round_up(span.stop - span.start, PAGE_NBYTES)
        if staged.numel() < nbytes:
            raise ValueError(f"{self.name}: {staged.numel()} bytes to stage {nbytes}")
        return staged.numpy().data[:nbytes]

    def _read(self, piece: int, pages: memoryview, priority: Priority) -> Transfer[None]:
        block = self._blocks[piece]
        assert block is not None, "checked by the caller"
        return self._store.read(block, pages, priority=priority)

    def _write_back(self, piece: int, pages: memoryview) -> Transfer[None]:
        """Write a piece to a new extent; its table entry changes when the write is complete (of
        gradients, whose old version is no undo record, before that).

        Where the tier is full of versions that other writes are replacing, waits for those,
        without the lock.
        """
        arrived = self._write(piece, pages)
        if not arrived.done():  # `_commit` needs the lock held here, unless it ran in this thread
            self._writes[piece] = arrived
        arrived.then(self._note_failure)
        return arrived

    def _write(self, piece: int, pages: memoryview) -> Transfer[Any]:
        before = self._blocks[piece]
        if before is not None and self._class is StateClass.GRADIENTS:
            self._blocks[piece] = None  # an old sum is never gone back to
            self._store.free(before)
        old = self._old
        replaces = self._blocks[piece] if old is None else None
        while True:
            try:
                return self._store.write(
                    pages, owner=self.name, state_class=self._class, replaces=replaces,
                    priority=Priority.BACKGROUND,
                    committed=lambda block: self._commit(piece, block, old),
                )  # fmt: skip
            except TierFullError:
                if not self._store.await_room():
                    raise

    def _commit(self, piece: int, block: StoredBlock, old: dict[int, StoredBlock] | None) -> None:
        """The write is complete (lock held). `old` is where the version before goes, if that trial
        is not decided yet; without one the store has freed it."""
        before, self._blocks[piece] = self._blocks[piece], block
        if old is not None and before is not None:
            if old is self._old and piece not in old:
                old[piece] = before
            else:
                self._store.free(before)
        self._writes.pop(piece, None)

    def _note_failure(self, arrived: Transfer[None]) -> None:
        if arrived.failure is not None:
            self._failure = arrived.failure

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.again()


class FileSnapshot:
    """A snapshot of blocks in a store. These versions stay until they are let go, whatever is
    written meanwhile, and take room beside the new ones. Its reads come after those of the model
    and of updates."""

    is_versioned = True

    def __init__(self, store: BlockStore, blocks: Sequence[StoredBlock]) -> None:
        """The lock must be held, or the blocks might be freed before they are kept."""
        self._store = store
        self._blocks: list[StoredBlock | None] = list(blocks)
        for block in blocks:
            store.keep(block)

    def host_piece(self, piece: int) -> HostPiece | None:
        return None

    def read_piece(self, piece: int, destination: torch.Tensor) -> Transfer[None]:
        block = self._blocks[piece]
        assert block is not None, "not let go yet"
        pages = destination.numpy().data[: round_up(block.nbytes, PAGE_NBYTES)]
        return self._store.read(block, pages, priority=Priority.BACKGROUND)

    def let_go(self, piece: int) -> None:
        block, self._blocks[piece] = self._blocks[piece], None
        if block is not None:
            self._store.let_go(block)
