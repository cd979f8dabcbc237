"""State whose home is a file, with a copy in a slot of memory at times.

                prefetch              arrivals done
    ABSENT ───────────────▶ ARRIVING ───────────────▶ CLEAN ──evict──▶ ABSENT
                                                      ▲   │ mark_dirty
                                         writes done  │   ▼
                                     LEAVING ◀─write_back─ DIRTY

The states are not stored but follow from what is in flight, so they cannot disagree with it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload.swap.io.block_store import BlockStore
from offload.swap.io.io_backend import Priority
from offload.swap.states.slot import Slot, SlotUser
from offload.swap.states.state import HostPiece, Snapshot, State
from offload.swap.states.versioned_file import VersionedFile
from offload.swap.threads.shield import defer_signals, interrupted_in_waits
from offload.swap.threads.transfer import Transfer, all_of
from offload.tiers.errors import StateError
from offload.tiers.ledger import OldBytes, StateClass
from offload.tiers.tier import PAGE_NBYTES, Residency
from offload.tiers.units import round_up


class CachedFileState(State, SlotUser):
    """A flat buffer at home in a file of a `BlockStore`, and copied to `slot` while it is used.
    Thread-safe: the pool's lock guards its fields, and is the store's, too."""

    can_snapshot = True

    def __init__(
        self, store: BlockStore, slot: Slot, piece_nbytes: int, trainable_nbytes: int | None = None,
        stride_nbytes: int | None = None,
    ) -> None:  # fmt: skip
        """`slot` says how the state is called and how long it is, and is lent to no other."""
        super().__init__(slot.name, slot.nbytes, piece_nbytes, trainable_nbytes, stride_nbytes)
        inner = [self.span(piece).start for piece in range(self.pieces)]
        if any(start % PAGE_NBYTES for start in inner):
            raise ValueError(f"{self.name}: pieces of {piece_nbytes} bytes would share pages")
        self.slot = slot
        slot.user = self
        self._lock = slot.lock
        self._class = slot.state_class
        self._file = VersionedFile(self.name, self.pieces, slot.state_class, store)
        self._dirty: set[int] = set()
        self._filling = False  # between `blank` and `mark_dirty`: neither dropped nor sent home
        self._being_sent = False  # some thread is in `write_back`

    # ---------------------------------------------------------------- what the pool asks
    def may_evict(self) -> bool:
        if self._filling or self._dirty or self._file.writes:
            return False
        return self._file.failure is None

    @defer_signals
    def write_back(self) -> None:
        """Start taking every dirty piece home; gradients only while no view of them is alive."""
        with self._lock:
            if self._class is StateClass.GRADIENTS and self.slot.in_use():
                return
            if self._being_sent:  # another thread waits in `VersionedFile.write`
                self._file.await_room()
                return
            self._being_sent = True
            try:
                while self._dirty:
                    piece = min(self._dirty)
                    self._file.write(piece, self.slot.pages(self.span(piece)))
                    self._dirty.discard(piece)  # not before: a dirty copy is not dropped
            finally:
                self._being_sent = False

    def transit(self) -> Callable[[], object] | None:
        with self._lock:
            moving = [*self.slot.arrivals.values(), *self._file.writes.values()]
            pending = [transfer for transfer in moving if not transfer.done()]
        if not pending:
            return None
        return lambda: all_of(pending).wait()

    # ---------------------------------------------------------------- compute side
    def residency(self) -> Residency:
        with self._lock:
            if self.slot.lease is None:
                return Residency.ABSENT
            if self._filling or self._dirty:
                return Residency.DIRTY
            if self._file.writes:
                return Residency.LEAVING
            return Residency.CLEAN if self.slot.has_arrived() else Residency.ARRIVING

    def prefetch(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        self._file.raise_failure()
        if self.slot.lease is not None:  # without the lock: no less true than just after it
            return True
        return self._take_slot(next_use, fill=priority)

    @interrupted_in_waits
    def _take_slot(self, next_use: float | None, fill: Priority | None) -> bool:
        """Lease a slot and, with `fill`, start reading into it. False where there is no room."""
        if fill is not None and not self._file.is_whole():
            raise StateError(f"{self.name} is read before it was ever written")
        while leaving := self._staged_writes(fill):
            if next_use is not None:
                return False
            all_of(leaving).wait()
        lease = self.slot.request(next_use)
        if lease is None:
            return False
        with self._lock:
            if self.slot.lease is not None:  # another thread was faster
                lease.free()
                return True
            if self._staged_writes(fill):  # one has just begun
                lease.free()
                return next_use is None and self._take_slot(next_use, fill)
            self.slot.hold(lease)
            if fill is not None:
                for piece in range(self.pieces):
                    self._read_into_slot(piece, fill)
        return True

    def _staged_writes(self, fill: Priority | None) -> list[Transfer[None]]:
        """The writes of staged pieces under way, if a read is asked for: the home has their old
        version until then."""
        with self._lock:
            return [] if fill is None else list(self._file.writes.values())

    @interrupted_in_waits
    def tensor(self) -> torch.Tensor:
        while True:
            self.prefetch(next_use=None, priority=Priority.URGENT)
            with self._lock:
                lease, arrivals = self.slot.lease, list(self.slot.arrivals.values())
                if lease is not None and all(a.done() and a.failure is None for a in arrivals):
                    self.slot.arrivals.clear()
                    return lease.tensor[: self.nbytes]
            all_of(arrivals).wait()
            # it may be dropped between its arrival and a view of it: bring it again

    @defer_signals
    def blank(self) -> torch.Tensor:
        self._file.raise_failure()
        while True:
            with self._lock:
                if self.slot.lease is not None:
                    view = self.slot.view()
                    waits = [*self.slot.arrivals.values(), *self._file.writes.values()]
                    self._filling = True
                    self._dirty.clear()
                    break
            self._take_slot(None, fill=None)
        all_of(waits).wait()
        return view

    @defer_signals
    def mark_dirty(self, *, trainable_only: bool = False) -> None:
        with self._lock:
            if self.slot.lease is None:
                raise StateError(f"{self.name} holds no memory that could have been written")
            if not self._filling and not self.slot.in_use():
                raise StateError(
                    f"{self.name}: written without a view of its slot, so the written values may "
                    "have been dropped meanwhile"
                )
            all_of_it = self._filling or not trainable_only
            changed = range(self.pieces if all_of_it else self._trainable_pieces)
            self._dirty.update(changed)  # first: a dirty copy is not dropped
            self._filling = False
            if self._class is StateClass.GRADIENTS:
                self.slot.pool.may_write_back(self.slot)
                return
            leaving = list(self._file.writes.values())
        all_of(leaving).wait()  # a piece has one write on its way at a time
        self.write_back()

    # ---------------------------------------------------------------- update side
    @defer_signals
    def host_piece(self, piece: int) -> HostPiece | None:
        self._file.raise_failure()
        with self._lock:
            if self.slot.lease is None:
                return None
            moving = (self.slot.arrivals.get(piece), self._file.writes.get(piece))
            view = self.slot.lease.tensor[self.span(piece)]
            return HostPiece(view, tuple(transfer for transfer in moving if transfer is not None))

    @defer_signals
    def mark_piece_dirty(self, piece: int) -> None:
        with self._lock:
            self._file.write(piece, self.slot.pages(self.span(piece)))

    @interrupted_in_waits
    def read_piece(self, piece: int, destination: torch.Tensor) -> Transfer[None]:
        self._file.raise_failure()
        with self._lock:
            before = self._file.writes.get(piece)
        if before is not None:
            before.wait()
        with self._lock:
            pages = self._staged_pages(piece, destination)
            return self._file.read(piece, pages, Priority.NORMAL)

    @defer_signals
    def write_piece(self, piece: int, source: torch.Tensor) -> Transfer[None]:
        self._file.raise_failure()
        with self._lock:
            return self._file.write(piece, self._staged_pages(piece, source))

    # ---------------------------------------------------------------- a speculative update
    def undoable(self) -> CachedFileState:
        return self

    @property
    def old_nbytes(self) -> OldBytes:
        return OldBytes(files=round_up(self.nbytes, PAGE_NBYTES) + self.pieces * PAGE_NBYTES)

    def has_views(self) -> bool:
        with self._lock:
            return self.slot.in_use()

    def keep_old(self) -> bool:
        with self._lock:
            self._file.keep_old()
        return True

    @defer_signals
    def drop_old(self) -> None:
        with self._lock:
            self._file.drop_old()

    @defer_signals
    def go_back(self) -> None:
        self.settle()
        with self._lock:
            changed = self._file.go_back()
            if changed and self.slot.lease is not None:
                if self.slot.can_evict():
                    self.slot.evict()
                else:  # a view that was kept shows the valid bytes
                    for piece in changed:
                        self._read_into_slot(piece, Priority.NORMAL)

    # ---------------------------------------------------------------- a save in the background
    @defer_signals
    def snapshot(self) -> Snapshot:
        self.write_back()
        self.settle()
        with self._lock:
            return self._file.snapshot()

    @defer_signals
    def discard(self) -> None:
        try:
            self.settle()
        finally:  # what failed has ended, too, and its memory is given back
            with self._lock:
                self._dirty.clear()
                self._filling = False
                self.slot.give_back()
                self._file.free()

    @interrupted_in_waits
    def settle(self) -> None:
        while True:
            with self._lock:
                pending = [*self.slot.arrivals.values(), *self._file.writes.values()]
                being_sent = self._being_sent
            all_of(pending).wait()
            if not being_sent:
                break
            self._file.await_room()
        self._file.raise_failure()

    def close(self) -> None:
        self.discard()

    def _staged_pages(self, piece: int, staged: torch.Tensor) -> memoryview:
        span = self.span(piece)
        nbytes = round_up(span.stop - span.start, PAGE_NBYTES)
        if staged.numel() < nbytes:
            raise ValueError(f"{self.name}: {staged.numel()} bytes to stage {nbytes}")
        return staged.numpy().data[:nbytes]

    def _read_into_slot(self, piece: int, priority: Priority) -> None:
        pages = self.slot.pages(self.span(piece))
        try:
            arrival = self._file.read(piece, pages, priority)
        except BaseException as error:  # noqa: BLE001  raised by all that wait for the piece
            arrival = Transfer(f"{self.name}: a read that did not begin")
            arrival.fail(error)
        self.slot.arrivals[piece] = arrival
