"""State whose home stores codes: decoded into a slot of memory while it is computed with.

    home    ├ codes ┤        any State: in memory, in a file
               │ decode    ▲ encode
               ▼           │
    slot    ├───── values ─────┤

The slot always holds the decoded codes of the home: writes are rounded at once, so results do not
depend on when a slot was evicted. Elements that are written with the values that they had keep
their codes. It is one piece, and has no update side: what is stored in codes is frozen.

Nothing is decoded ahead of its use: decoding and computing share the same processors, and reads of
the next codes go on meanwhile. A slot is evicted before any codes are: decoding takes a fraction of
the time of a read, and a slot a multiple of the memory. If the last use decoded its values, the
slot is leased as soon as the buffer is needed, before prefetched codes fill its place: they would
have to be evicted, and read again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from offload.swap.io.io_backend import Priority
from offload.swap.states.slot import CachedState
from offload.swap.states.slot_pool import MADE_HERE, SlotPool
from offload.swap.states.state import Codec, State
from offload.swap.threads.shield import interrupted_in_waits
from offload.tiers.errors import StateError
from offload.tiers.ledger import StateClass
from offload.tiers.tier import PAGE_NBYTES, Residency
from offload.tiers.units import round_up

MakeHome = Callable[[int], State]  # makes the home of so many bytes


class CodedState(CachedState):
    """`nbytes` in a slot of `pool` while computed with, as a codec stores them at home."""

    has_codes = True

    def __init__(
        self, nbytes: int, codec: Codec, make_home: MakeHome, pool: SlotPool,
        next_use: Callable[[], float],
    ) -> None:  # fmt: skip
        """Raises ValueError if the codec cannot store so many bytes."""
        home = make_home(codec.stored_nbytes(nbytes))
        super().__init__(home, home.name, nbytes, nbytes, pool, next_use)
        self._codec = codec
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

    def transit(self) -> Callable[[], object] | None:
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
                self._codec.decode(self._home.tensor(), view)
            except BaseException:
                with self._lock:
                    self.evict()  # the next caller must not take what is half there for values
                raise
            self._is_blank, self._was_decoded = False, True
            with self._lock:
                self._pool.keep_for_values(self)
            return view

    def codes(self) -> tuple[Codec, torch.Tensor]:
        return self._codec, self._home.tensor()

    def blank(self) -> torch.Tensor:
        return self._take_slot()

    def _take_slot(self) -> torch.Tensor:
        """The slot's memory, blank until it is filled; leases a slot if none is held."""
        with self._lock:
            view = self._blank_slot()
        if view is not None:
            return view
        lease = self._lease_slot(None, StateClass.PARAMETERS)
        assert lease is not None, "demanded"
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
        try:
            store(view, stored)
        except BaseException:
            if not is_new:
                self._codec.decode(stored, view)  # what was refused is not there
            raise
        self._codec.decode(stored, view)
        self._home.mark_dirty()
        self._is_blank, self._is_stored = False, True

    def residency(self) -> Residency:
        with self._lock:
            if self._has_values:
                return Residency.DIRTY if self._is_blank else Residency.CLEAN
        return self._home.residency()

    # ---------------------------------------------------------------- update side
    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise StateError(f"{self.name} is stored in codes, which no update reads or changes")

    host_piece = mark_piece_dirty = read_piece = write_piece = _refuse

    # ---------------------------------------------------------------- both
    def settle(self) -> None:
        self._home.settle()
