"""State at home in the memory that it is used in: `MemoryState`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from offload.swap.io.io_backend import Priority
from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import HostPiece, Snapshot, State
from offload.swap.threads.shield import defer_signals
from offload.swap.threads.transfer import Transfer
from offload.tiers.ledger import OldBytes, StateClass
from offload.tiers.memory_tier import Lease
from offload.tiers.tier import Residency


class MemoryState(State):
    """State that is used in the memory that is its home: nothing ever moves."""

    in_place = True
    can_snapshot = True

    def __init__(
        self, name: str, nbytes: int, piece_nbytes: int, lease: Lease | None,
        trainable_nbytes: int | None = None, stride_nbytes: int | None = None,
        spare: SlotPool | None = None,
    ) -> None:  # fmt: skip
        """`lease` is None where there are no bytes. `spare` has the memory for old versions."""
        super().__init__(name, nbytes, piece_nbytes, trainable_nbytes, stride_nbytes)
        self._lease = lease
        self.spare = spare
        self._old: Lease | None = None
        self._replaced: set[int] = set()  # pieces whose old version is there
        # A step may count an update that has not begun: no piece is kept any more from then on.
        self._old_lock = threading.Lock()
        self._memory = torch.empty(0, dtype=torch.uint8) if lease is None else lease.tensor

    def prefetch(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        return True

    def tensor(self) -> torch.Tensor:
        return self._memory[: self.nbytes]

    def blank(self) -> torch.Tensor:
        return self.tensor()

    def mark_dirty(self, *, trainable_only: bool = False) -> None:
        """Do nothing: the buffer is its home."""

    def residency(self) -> Residency:
        return Residency.CLEAN

    def host_piece(self, piece: int) -> HostPiece | None:
        span = self.span(piece)
        with self._old_lock:
            if self._old is not None and piece not in self._replaced:
                self._old.tensor[span].copy_(self._memory[span])  # about to be written
                self._replaced.add(piece)
        return HostPiece(self._memory[span])

    def mark_piece_dirty(self, piece: int) -> None:
        """Do nothing: the piece is at home."""

    def read_piece(self, piece: int, destination: torch.Tensor) -> Transfer[None]:
        span = self.span(piece)
        destination[: span.stop - span.start].copy_(self._memory[span])
        return Transfer.completed(None)

    def write_piece(self, piece: int, source: torch.Tensor) -> Transfer[None]:
        span = self.span(piece)
        self._memory[span].copy_(source[: span.stop - span.start])
        return Transfer.completed(None)

    def undoable(self) -> MemoryState | None:
        return None if self.spare is None else self

    def has_views(self) -> bool:
        return self._lease is not None and self._lease.in_use()

    @property
    def old_nbytes(self) -> OldBytes:
        return OldBytes(memory=self.nbytes)

    def keep_old(self) -> bool:
        pool = self.spare
        assert pool is not None, "asked before"
        self._old = pool.offer(
            self.nbytes, f"{self.name} before the step", StateClass.STAGING,
            next_use=pool.uses_left(),
        )  # fmt: skip
        return self._old is not None

    def drop_old(self) -> None:
        with self._old_lock:
            self._replaced.clear()
            old, self._old = self._old, None
        if old is not None and self.spare is not None:
            with self.spare.lock:
                old.free()

    @defer_signals
    def go_back(self) -> None:
        if self._old is not None:
            for span in map(self.span, self._replaced):
                self._memory[span].copy_(self._old.tensor[span])
        self.drop_old()

    def snapshot(self) -> Snapshot:
        return HomeSnapshot(lambda piece, pages: HostPiece(self._memory[self.span(piece)]))

    def discard(self) -> None:
        """Keep the memory, which is a permanent home; its content no longer counts."""

    def settle(self) -> None:
        """Do nothing: no transfer is ever under way."""

    def close(self) -> None:
        self.drop_old()
        if self._lease is not None:
            self._lease.free()


@dataclass(frozen=True)
class HomeSnapshot:
    """A snapshot that is the home itself: a piece must not be overwritten before it was let go."""

    read: Callable[[int, torch.Tensor], HostPiece]
    is_versioned = False

    def let_go(self, piece: int) -> None:
        """Do nothing: the memory is the home's."""
