"""The choice of pieces that stay in the window, leave for the disk, or are evicted.

Backward needs last what forward saved first. So pieces leave in the order they were filled, and
only as many as have to: half of the window is kept unwritten, and pieces that die or are needed
while there never touch the disk. A written piece stays until its place is needed; the one saved
first goes first (Belady, 1966, for a stack).

         saved first ──────────────────────────────────▶ saved last
         ABSENT ABSENT CLEAN CLEAN LEAVING │ DIRTY DIRTY DIRTY
                       └ next to go                    (half of the window)
"""

import bisect
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from offload.swap.activations.activation_record import SavedPiece
from offload.swap.activations.activation_window import ActivationWindow, WindowSlot
from offload.swap.device.streams import StreamEvent
from offload.swap.io.block_store import BlockStore
from offload.swap.io.io_backend import Priority
from offload.swap.threads.transfer import Failure, Transfer, is_stuck
from offload.tiers.errors import NoSpaceError, TierFullError
from offload.tiers.ledger import StateClass
from offload.tiers.tier import PAGE_NBYTES, Residency
from offload.tiers.units import round_up

OWNER = "saved activations"


@dataclass(eq=False, repr=False)
class Backlog:
    """The pieces in a window. `lock` guards it: methods acquire it, or say that it must be held."""

    window: ActivationWindow
    store: BlockStore | None  # without one the window is the pieces' home: nothing leaves it
    disk_nbytes: int  # that are stored at a time, at most
    lock: threading.RLock
    stored_nbytes: int = 0  # on disk, or being written
    disk_full: TierFullError | NoSpaceError | None = None  # the last refusal
    _unwritten: dict[SavedPiece, None] = field(default_factory=dict)  # in the order of filling
    _unwritten_nbytes: int = 0
    _clean: list[SavedPiece] = field(default_factory=list)  # the first saved first
    _moving: dict[SavedPiece, Transfer[Any]] = field(default_factory=dict)
    # of dead pieces: still viewed, or a copy
    _lent: list[tuple[WindowSlot, StreamEvent]] = field(default_factory=list)
    _failure: Failure | None = None  # a write that failed

    def demand(self, nbytes: int) -> WindowSlot | None:
        """A slot; waits for moves under way that make room. None where none would.

        Raises StorageError if one of them failed.
        """
        while True:
            self.raise_failure()
            with self.lock:
                slot = self.offer(nbytes, below=math.inf)
                if slot is not None:
                    return slot
                wait = self._whatever_moves()
            if wait is None:
                return None
            wait()

    def offer(self, nbytes: int, *, below: float) -> WindowSlot | None:
        """A slot, now or not at all, in place of clean pieces with numbers `below` (lock held)."""
        while True:
            slot = self.window.take(nbytes)
            if slot is not None or not (self._reap() or self._evict(below)):
                return slot

    def _evict(self, below: float) -> bool:
        """Let the clean piece that was saved first give up its slot."""
        for index, piece in enumerate(self._clean):
            if piece.number >= below:
                return False
            assert piece.slot is not None, "clean"
            if piece.copied.done() and not piece.slot.in_use():
                del self._clean[index]
                piece.slot.free()
                piece.slot = None
                return True
        return False

    def _reap(self) -> bool:
        """Free the slots of dead pieces that no tensor views any more."""
        free = [(slot, mark) for slot, mark in self._lent if mark.done() and not slot.in_use()]
        if free:
            gone = {id(slot) for slot, _ in free}
            self._lent = [entry for entry in self._lent if id(entry[0]) not in gone]
        for slot, _ in free:
            slot.free()
        return bool(free)

    def _whatever_moves(self) -> Callable[[], object] | None:
        """A wait for the next thing that makes room (lock held)."""
        if not self._moving:
            self._write_behind(max_nbytes=0, pieces=1)
        for transfer in self._moving.values():
            return transfer.wait
        filling = [piece.copied for piece in self._unwritten if not piece.copied.done()]
        marks = filling + [mark for _, mark in self._lent if not mark.done()]
        return marks[0].wait if marks else None

    def filled(self, piece: SavedPiece) -> None:
        """The piece's slot holds its bytes now, or will when the copy into it is done."""
        if self.store is None:
            return
        with self.lock:
            assert piece.slot is not None, "just filled"
            self._unwritten[piece] = None
            self._unwritten_nbytes += piece.slot.nbytes
            self._write_behind(max_nbytes=self.window.nbytes // 2)

    def _write_behind(self, max_nbytes: int, pieces: float = math.inf) -> None:
        """Start writing until at most `max_nbytes` are unwritten, or no more can be (lock held)"""
        while self._unwritten and self._unwritten_nbytes > max_nbytes and pieces > 0:
            piece = next(iter(self._unwritten))
            if not piece.copied.done() or not self._write_back(piece):
                return
            pieces -= 1

    def _take_off_list(self, piece: SavedPiece) -> None:
        """Take the piece, which is being written or no longer needed, off the unwritten ones."""
        assert piece.slot is not None, "unwritten"
        del self._unwritten[piece]
        self._unwritten_nbytes -= piece.slot.nbytes

    def _write_back(self, piece: SavedPiece) -> bool:
        """Start writing; False where the disk has no room for it."""
        slot = piece.slot
        assert slot is not None, "a piece to be written is in the window"
        assert self.store is not None, "without a store nothing leaves"
        if self.stored_nbytes + slot.nbytes > self.disk_nbytes:
            free = max(0, self.disk_nbytes - self.stored_nbytes)
            self.disk_full = TierFullError(
                "nvme", OWNER, slot.nbytes, free, self.disk_nbytes,
                "raise budget.nvme or lower the batch size",
            )  # fmt: skip
            return False
        try:
            write = self.store.write(
                slot.pages(), owner=OWNER, state_class=StateClass.ACTIVATIONS,
                priority=Priority.BACKGROUND, committed=partial(setattr, piece, "block"),
            )  # fmt: skip
        except (TierFullError, NoSpaceError) as error:  # the piece stays where it is, whole
            self.disk_full = error
            return False
        self.stored_nbytes += slot.nbytes
        self._take_off_list(piece)
        piece.write = self._moving[piece] = write
        write.then(lambda ended: self._written_back(piece, ended))
        return True

    def _written_back(self, piece: SavedPiece, ended: Transfer[Any]) -> None:
        """Record the end of a piece's write; called in the thread that wrote it."""
        with self.lock:
            piece.write = None
            del self._moving[piece]
            if ended.failure is not None:
                self._failure = ended.failure
                self.stored_nbytes -= round_up(piece.nbytes, PAGE_NBYTES)
            self._settled(piece)

    def read(self, piece: SavedPiece, slot: WindowSlot, priority: Priority) -> None:
        """Start reading an absent piece into `slot` (lock held)."""
        assert self.store is not None, "absent"
        assert piece.block is not None, "absent"
        piece.slot, piece.copied = slot, StreamEvent()
        arrival = self.store.read(piece.block, slot.pages(), priority=priority)
        piece.arrival = self._moving[piece] = arrival
        arrival.then(lambda ended: self._arrived(piece, ended))

    def _arrived(self, piece: SavedPiece, ended: Transfer[None]) -> None:
        with self.lock:
            del self._moving[piece]
            piece.arrival = None
            if ended.failure is not None and piece.slot is not None:  # absent, as it was
                if not is_stuck(ended):
                    self.lend(piece.slot, piece.copied)
                piece.slot = None
            self._settled(piece)

    def read_directly(self, piece: SavedPiece, destination: torch.Tensor) -> Transfer[None]:
        """Start reading an absent piece into page-aligned memory (lock held)."""
        assert self.store is not None, "absent"
        assert piece.block is not None, "absent"
        pages = destination[: round_up(piece.nbytes, PAGE_NBYTES)].numpy().data
        return self.store.read(piece.block, pages, priority=Priority.URGENT)

    def _settled(self, piece: SavedPiece) -> None:
        """Bury or list the piece, which no transfer moves any more (lock held)."""
        if piece.dead:
            self.bury(piece)
        elif piece.residency is Residency.CLEAN:
            bisect.insort(self._clean, piece, key=lambda each: each.number)

    def bury(self, piece: SavedPiece) -> None:
        """The piece is not needed: free its slot and block, after what moves it now (lock held)."""
        piece.dead = True
        if piece in self._clean:
            self._clean.remove(piece)
        if piece in self._unwritten:
            self._take_off_list(piece)
        if piece in self._moving:
            return
        if piece.block is not None and self.store is not None:
            self.store.free(piece.block)
            self.stored_nbytes -= piece.block.extent.nbytes
            piece.block = None
        if piece.slot is not None:
            self.lend(piece.slot, piece.copied)
            piece.slot = None
        self._reap()

    def lend(self, slot: WindowSlot, mark: StreamEvent) -> None:
        """`slot` is freed when `mark` is done and no tensor views it (lock held)."""
        self._lent.append((slot, mark))

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.again()

    def settle(self) -> None:
        """Wait for every move under way; raises what went wrong."""
        with self.lock:
            moving = list(self._moving.values())
        for transfer in moving:
            transfer.wait()
        with self.lock:
            self._reap()
        self.raise_failure()
