"""State whose home stores codes: decoded into a slot of memory while it is computed with.

    home    ├ codes 0 ┤├ codes 1 ┤        any State: in memory, in a file
               │ decode    ▲ encode
               ▼           │
    slot    ├──── piece 0 ────┤├──── piece 1 ────┤

Each piece is stored by itself; the home may have pieces of another size. The slot always holds the
decoded codes of the home: writes are rounded at once, so results do not depend on when a slot was
evicted. Elements that are written with the values that they had keep their codes.

Nothing is decoded ahead of its use: decoding and computing share the same processors, and reads of
the next codes go on meanwhile. A slot is evicted before any codes are: decoding takes a fraction of
the time of a read, and a slot a multiple of the memory. If the last use decoded its values, the
slot is leased as soon as the buffer is needed, before prefetched codes fill its place: they would
have to be evicted, and read again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from offload.swap.io.io_backend import Priority
from offload.swap.states.slot_pool import MADE_HERE, SlotPool
from offload.swap.states.slot_state import SlotState
from offload.swap.states.state import Codec, HostPiece, State
from offload.swap.threads.shield import interrupted_in_waits
from offload.swap.threads.transfer import Transfer
from offload.tiers.errors import StateError
from offload.tiers.ledger import StateClass
from offload.tiers.tier import PAGE_NBYTES, Residency
from offload.tiers.units import round_up

# Makes the home: its bytes, and those of each of its pieces but the last.
MakeHome = Callable[[int, int], State]


class CodedState(SlotState):
    """`nbytes` in a slot of `pool` while computed with, as a codec stores them at home."""

    has_codes = True

    def __init__(
        self, nbytes: int, piece_nbytes: int, codec: Codec, make_home: MakeHome, pool: SlotPool,
        next_use: Callable[[], float],
    ) -> None:  # fmt: skip
        """Raises ValueError if the codec cannot store a piece."""
        step = round_up(codec.stored_nbytes(min(piece_nbytes, nbytes)), PAGE_NBYTES)
        whole, rest = divmod(nbytes, piece_nbytes)
        stored = whole * step + (codec.stored_nbytes(rest) if rest else 0)
        self._home = make_home(stored, step)
        super().__init__(self._home.name, nbytes, piece_nbytes, pool, next_use)
        self._codec = codec
        self._step = step  # from the codes of one piece to those of the next
        self._is_blank = False  # the slot is being overwritten, and says nothing yet
        self._is_reserved = False  # the slot is empty, and taken for values that are needed now
        self._was_decoded: bool | None = None  # at its last use
        self._is_stored = False  # the home has codes
        self._decoding = threading.Lock()  # one thread fills the slot, others wait for it

    # ---------------------------------------------------------------- what the pool asks
    def next_use(self) -> float:
        use = super().next_use()
        return use + MADE_HERE if use >= 0 else use

    def can_evict(self) -> bool:
        if self._slot is None or self._is_blank or self._pool.is_kept(self):
            return False
        return not self._slot.in_use()

    def _forget_arrival(self) -> None:
        self._is_blank = self._is_reserved = False

    def write_back(self) -> None:
        """Do nothing: a slot is never dirty, since what is written to it is stored at once."""

    def transit(self) -> Callable[[], None] | None:
        return None

    # ---------------------------------------------------------------- compute side
    def prefetch(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        """Bring the codes of the home; they are decoded when the buffer is used."""
        with self._lock:
            if self._has_values:
                return True
            if next_use is not None and next_use < 0:  # it is used now
                if self._was_decoded is False:
                    self._pool.keep_no_values(round_up(self.nbytes, PAGE_NBYTES))
                elif self._slot is None and (self._was_decoded or self._pool.makes_values):
                    self._reserve()
                self._was_decoded = False
        return self._home.prefetch(next_use=next_use, priority=priority)

    @property
    def _has_values(self) -> bool:
        """Whether a slot is held that is not merely reserved for values."""
        return self._slot is not None and not self._is_reserved

    def _reserve(self) -> None:
        size = round_up(self.nbytes, PAGE_NBYTES)
        lease = self._pool.offer_for_values(size, self.name, StateClass.PARAMETERS)
        if lease is not None:
            self._slot, self._is_reserved = lease, True
            self._pool.register(self)
            self._pool.keep_for_values(self)

    @interrupted_in_waits
    def tensor(self) -> torch.Tensor:
        with self._decoding:
            with self._lock:
                if self._slot is not None and self._has_values:
                    return self._slot.tensor[: self.nbytes]
            # before its codes are held: these fit into smaller holes
            view = self._take_slot()
            try:
                stored = self._home.tensor()
                for piece in range(self.pieces):
                    self._decode(piece, stored, view)
            except BaseException:
                with self._lock:
                    self.evict()  # the next caller must not take what is half there for values
                raise
            self._is_blank, self._was_decoded = False, True
            with self._lock:
                self._pool.keep_for_values(self)
            return view

    def codes(self) -> tuple[Codec, torch.Tensor]:
        return self._codec, self._stored(0, self._home.tensor())

    def blank(self) -> torch.Tensor:
        return self._take_slot()

    def _take_slot(self) -> torch.Tensor:
        """The slot's memory, blank until it is filled; leases a slot if none is held."""
        with self._lock:
            view = self._blank_slot()
        if view is not None:
            return view
        size = round_up(self.nbytes, PAGE_NBYTES)
        lease = self._pool.demand(size, self.name, StateClass.PARAMETERS)
        with self._lock:
            view = self._blank_slot()
            if view is not None:  # another thread has taken or reserved one meanwhile
                lease.free()
                return view
            self._slot, self._is_blank = lease, True
            self._pool.register(self)
            return lease.tensor[: self.nbytes]

    def _blank_slot(self) -> torch.Tensor | None:
        """The slot's memory, marked as blank; None if no slot is held."""
        if self._slot is None:
            return None
        self._is_blank, self._is_reserved = True, False
        return self._slot.tensor[: self.nbytes]

    def _decode(self, piece: int, stored: torch.Tensor, view: torch.Tensor) -> None:
        self._codec.decode(self._stored(piece, stored), view[self.span(piece)])

    def _stored(self, piece: int, stored: torch.Tensor) -> torch.Tensor:
        """The codes of a piece, without what fills its last page."""
        span, start = self.span(piece), piece * self._step
        return stored[start : start + self._codec.stored_nbytes(span.stop - span.start)]

    def mark_dirty(self, *, to_edge: bool = False) -> None:
        """Store what was written at once, and round the slot to what is stored."""
        with self._lock:
            if self._slot is None or not self._has_values:
                raise StateError(f"{self.name} holds no memory that could have been written")
            view = self._slot.tensor[: self.nbytes]
        self._home.settle()  # what goes home must not be half of what is written now
        is_new = self._is_blank or not self._is_stored
        stored = self._home.blank() if is_new else self._home.tensor()
        store = self._codec.encode if is_new else self._codec.update
        for piece in range(self.pieces):
            try:
                store(view[self.span(piece)], self._stored(piece, stored))
            except BaseException:
                if not is_new:
                    self._decode(piece, stored, view)  # what was refused is not there
                raise
            self._decode(piece, stored, view)
        self._home.mark_dirty()
        self._is_blank, self._is_stored = False, True

    def note_use(self) -> None:
        self._home.note_use()

    def residency(self) -> Residency:
        with self._lock:
            if self._has_values:
                return Residency.DIRTY if self._is_blank else Residency.CLEAN
        return self._home.residency()

    # ---------------------------------------------------------------- pieces in host memory
    def host_piece(self, piece: int) -> HostPiece | None:
        with self._lock:
            if self._slot is None or not self._has_values:
                return None
            return HostPiece(self._slot.tensor[self.span(piece)])

    def mark_piece_dirty(self, piece: int) -> None:
        with self._lock:
            if self._slot is None or not self._has_values:
                raise StateError(f"{self.name} is staged: use write_piece")
            view = self._slot.tensor[self.span(piece)]
        self.write_piece(piece, view)

    def read_piece(self, piece: int, destination: torch.Tensor) -> Transfer[None]:
        span = self.span(piece)
        target = destination[: span.stop - span.start]
        self._codec.decode(self._stored(piece, self._home.tensor()), target)
        return Transfer.completed(None)

    def write_piece(self, piece: int, source: torch.Tensor) -> Transfer[None]:
        span = self.span(piece)
        self._home.settle()  # what goes home must not be half of what is written now
        stored = self._home.tensor()
        self._codec.update(source[: span.stop - span.start], self._stored(piece, stored))
        self._home.mark_dirty()
        with self._lock:
            held = self._slot if self._has_values else None
            view = None if held is None else held.tensor[: self.nbytes]
        if view is not None:
            self._decode(piece, stored, view)
        return Transfer.completed(None)

    # ---------------------------------------------------------------- both
    def discard(self) -> None:
        with self._lock:
            if self._slot is not None:
                self.evict()
        self._home.discard()

    def settle(self) -> None:
        self._home.settle()

    def close(self) -> None:
        self.discard()
        self._home.close()
