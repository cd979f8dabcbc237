"""State whose home stores it quantized: dequantized into a slot while it is computed with.

    home    ├ quantized ┤        any State: in memory, in a file, mirrored on a device
               │ dequantize   ▲ quantize
               ▼              │
    slot    ├───────── values ─────────┤    host memory, or device memory: less crosses the link

The slot always holds what the home has, dequantized: writes are rounded at once, so results do not
depend on when a slot was evicted. Elements that are written with the values that they had stay as
they are stored. It is one piece, and has no update side: what is quantized is frozen.

Nothing is dequantized ahead of its use: that and computing share the same processors, and the next
reads go on meanwhile. A slot is evicted before any quantized bytes are: dequantizing takes a
fraction of the time of a read, and a slot a multiple of the memory. If the last use dequantized,
the slot is leased as soon as the buffer is needed, before prefetched bytes fill its place: they
would have to be evicted, and read again.

A device dequantizes on the model's stream, which then reads the slot. Before it writes there it
waits for whatever else works in that memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from offload.swap.device.device_slot import DeviceSlot
from offload.swap.io.io_backend import Priority
from offload.swap.states.slot import Slot, SlotUser
from offload.swap.states.slot_pool import MADE_HERE
from offload.swap.states.state import Quantizer, State
from offload.swap.threads.shield import interrupted_in_waits
from offload.tiers.errors import StateError
from offload.tiers.tier import PAGE_NBYTES, Residency
from offload.tiers.units import round_up


class QuantizedState(State, SlotUser):
    """The values of `slot`, which has room for them all, as a quantizer stores them in `home`. The
    slot is host memory, where the host works on it, too."""

    has_quantized = True

    def __init__(self, home: State, quantizer: Quantizer, slot: Slot) -> None:
        """`slot` says how long the values are, and is lent to no other state."""
        super().__init__(home.name, slot.nbytes, slot.nbytes)
        self.slot = slot
        slot.user = self
        slot.next_use = _after_reads(slot.next_use)
        self.home = home
        self.quantizer = quantizer
        self._pool = slot.pool
        self._lock = slot.lock
        self._is_blank = False  # the slot is being overwritten, and says nothing yet
        self._is_reserved = False  # the slot is empty, and taken for values that are needed now
        self._was_dequantized: bool | None = None  # at its last use
        self._is_stored = False  # the home has values
        self._dequantizing = threading.Lock()  # one thread fills the slot, others wait for it

    # ---------------------------------------------------------------- what the pool asks
    def may_evict(self) -> bool:
        return not self._is_blank and not self._pool.is_kept(self.slot)

    def evicted(self) -> None:
        self._is_blank = self._is_reserved = False

    # ---------------------------------------------------------------- compute side
    def prefetch(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        """Prefetch the home; it is dequantized when the buffer is used."""
        with self._lock:
            if self._has_values:
                return True
            if next_use is not None and next_use < 0:  # it is used now
                if self._was_dequantized is False:
                    self._pool.keep_no_values(round_up(self.nbytes, PAGE_NBYTES))
                elif self.slot.lease is None and (self._was_dequantized or self._pool.makes_values):
                    self._reserve()
                self._was_dequantized = False
        return self.home.prefetch(next_use=next_use, priority=priority)

    def held_values(self) -> torch.Tensor | None:
        """A view of the values in the slot, for the model's stream; None if it holds none."""
        with self._lock:
            if not self._has_values:
                return None
            self.slot.note_read()
            return self.slot.view()

    @property
    def _has_values(self) -> bool:
        """Whether a slot is held that is not merely reserved for values."""
        return self.slot.lease is not None and not self._is_reserved

    def _reserve(self) -> None:
        size = round_up(self.nbytes, PAGE_NBYTES)
        lease = self._pool.offer_for_values(size, self.name, self.slot.state_class)
        if lease is not None:
            self._is_reserved = True
            self.slot.hold(lease)
            self._pool.keep_for_values(self.slot)

    @interrupted_in_waits
    def tensor(self) -> torch.Tensor:
        with self._dequantizing:
            view = self.held_values()
            if view is not None:
                return view
            # before the home is held: its bytes fit into smaller holes
            view = self._take_slot()
            try:
                self.quantizer.dequantize(self.home.tensor(), view)
            except BaseException:
                with self._lock:
                    self.slot.evict()  # the next caller must not take what is half there for values
                raise
            self._is_blank, self._was_dequantized = False, True
            with self._lock:
                self._pool.keep_for_values(self.slot)
            return view

    def quantized(self) -> tuple[Quantizer, torch.Tensor]:
        return self.quantizer, self.home.tensor()

    def blank(self) -> torch.Tensor:
        return self._take_slot()

    def _take_slot(self) -> torch.Tensor:
        """The slot's memory, blank until it is filled; leases a slot if none is held."""
        with self._lock:
            if self.slot.lease is not None:
                return self._blank_slot()
        lease = self.slot.request(None)
        assert lease is not None, "demanded"
        with self._lock:
            self.slot.hold(lease)
            return self._blank_slot()

    def _blank_slot(self) -> torch.Tensor:
        """The memory of the slot, which holds some, marked as blank."""
        self._is_blank, self._is_reserved = True, False
        self.slot.begin_write()
        return self.slot.view()

    def mark_dirty(self, *, trainable_only: bool = False) -> None:
        """Store what was written at once, and round the slot to what is stored."""
        view = self.held_values()
        if view is None:
            raise StateError(f"{self.name} holds no memory that could have been written")
        self._store(view, is_new=self._is_blank or not self._is_stored)
        self._is_blank, self._is_stored = False, True

    def _store(self, view: torch.Tensor, *, is_new: bool) -> None:
        """Store the slot's `view`, and round it. `is_new`: it is no change of what was stored."""
        home, quantizer = self.home, self.quantizer
        home.settle()  # what goes home must not be half of what is written now
        stored = home.blank() if is_new else home.tensor()
        store = quantizer.quantize if is_new else quantizer.update
        try:
            store(view, stored)
        except BaseException:
            if not is_new:
                quantizer.dequantize(stored, view)  # what was refused is not there
            raise
        quantizer.dequantize(stored, view)
        home.mark_dirty()

    def note_use(self) -> None:
        self.slot.mark_reads()

    def residency(self) -> Residency:
        with self._lock:
            if self._has_values:
                return Residency.DIRTY if self._is_blank else Residency.CLEAN
        return self.home.residency()

    # ---------------------------------------------------------------- update side
    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise StateError(f"{self.name} is stored quantized, which no update reads or changes")

    host_piece = mark_piece_dirty = read_piece = write_piece = _refuse

    def settle(self) -> None:
        self.home.settle()

    def discard(self) -> None:
        self.slot.give_back()
        self.home.discard()

    def close(self) -> None:
        self.discard()
        self.home.close()


def _after_reads(next_use: Callable[[], float]) -> Callable[[], float]:
    """`next_use` of a slot whose values are evicted before anything that would have to be read."""

    def later() -> float:
        use = next_use()
        return use + MADE_HERE if use >= 0 else use

    return later


class DeviceQuantizedState(QuantizedState):
    """The slot is a device's, which dequantizes; the host works on a copy of the values, one state
    at a time."""

    has_quantized = False

    def __init__(self, home: State, quantizer: Quantizer, slot: DeviceSlot) -> None:
        super().__init__(home, quantizer, slot)
        self._copy = slot.links.host_copy
        self._is_new = False  # the copy is no change of what is stored

    def quantized(self) -> tuple[Quantizer, torch.Tensor]:
        return State.quantized(self)

    # ---------------------------------------------------------------- host side
    def host_tensor(self) -> torch.Tensor:
        stored = self.home.host_tensor()  # first: the home may lend of the same memory
        values = self._lend(is_new=False)
        self.quantizer.dequantize(stored, values)
        return values

    def host_blank(self) -> torch.Tensor:
        return self._lend(is_new=True)

    def _lend(self, *, is_new: bool) -> torch.Tensor:
        self._is_new = is_new
        return self._copy.lend(self)

    def mark_host_dirty(self) -> None:
        home, quantizer = self.home, self.quantizer
        values = self._copy.take_back(self)
        if self._is_new:
            stored = home.host_blank()
            quantizer.quantize(values, stored)
        else:
            stored = home.host_tensor()
            try:
                quantizer.update(values, stored)
            except BaseException:
                del stored
                self._refresh()  # what was refused is not there
                raise
        home.mark_host_dirty()
        del stored
        self._refresh()
        self._is_stored = True

    def _store(self, view: torch.Tensor, *, is_new: bool) -> None:
        """Store the slot's `view`, quantized on the CPU: users write to it outside of passes."""
        self._lend(is_new=is_new).copy_(view)
        self.mark_host_dirty()

    def _refresh(self) -> None:
        """Dequantize the home into the slot, if it holds values."""
        view = self.held_values()
        if view is not None:
            self.quantizer.dequantize(self.home.tensor(), view)
