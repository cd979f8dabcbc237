"""Weights in codes whose slot is device memory: codes cross the link, the device decodes them.

    home     ├ codes ┤            in host memory or a file and mirrored on the device, or there
                │ decode, on the model's stream
                ▼
    slot     ├──── values ────┤      device memory

The model's stream writes the slot and reads it. Before it writes, it waits for whatever else works
in that memory; copies into the memory of a slot that is given up wait for the model's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from offload.swap.device.device_slot import Links
from offload.swap.device.fences import OpenReads
from offload.swap.device.streams import StreamEvent
from offload.swap.states.quantized_state import CodedState, MakeHome
from offload.swap.states.slot import CachedState
from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import Codec
from offload.tiers.errors import StateError


class DeviceSlotState(CachedState):
    """A state whose slot is device memory: the model's stream reads it, and whatever else works in
    that memory is remembered by marks."""

    _links: Links
    _reads: OpenReads
    _before_write: tuple[StreamEvent, ...]  # what works in the slot until something else is written

    def still_read(self) -> bool:
        return self._slot is not None and self._slot.in_use()

    def read_until(self, mark: StreamEvent) -> None:
        self._before_write = mark.replacing(self._before_write)

    def _marks(self) -> Iterable[StreamEvent]:
        """The events of the work that still uses the slot."""
        return self._before_write

    def evict(self) -> None:
        self._reads.mark_now(self)
        if self._slot is not None:
            self._links.fences.retire(self._slot.extent, self._marks())
        super().evict()

    def note_use(self) -> None:
        with self._lock:
            self._reads.mark()


class DeviceCodedState(DeviceSlotState, CodedState):
    """`pool` is a pool of device memory, `reads` are its slots'. Values in host memory, for loading
    and reading out, are pageable and outside of any budget: one group at a time."""

    has_codes = False  # the device decodes them

    def __init__(
        self, nbytes: int, codec: Codec, make_home: MakeHome, pool: SlotPool, links: Links,
        reads: OpenReads, next_use: Callable[[], float],
    ) -> None:  # fmt: skip
        super().__init__(nbytes, codec, make_home, pool, next_use)
        self._links = links
        self._reads = reads
        self._before_write = ()
        self._is_new = False  # what is there is no change of what is stored

    def _forget_arrival(self) -> None:
        super()._forget_arrival()
        self._before_write = ()

    # ---------------------------------------------------------------- compute side
    def _take_slot(self) -> torch.Tensor:
        view = super()._take_slot()
        with self._lock:
            assert self._slot is not None, "taken just now, and blank"
            self._before_write = self._links.fences.claim(self._slot.extent)
            for mark in self._before_write:
                mark.before_compute()
        return view

    def tensor(self) -> torch.Tensor:
        view = super().tensor()
        with self._lock:
            self._reads.note(self)
        return view

    def mark_dirty(self, *, to_edge: bool = False) -> None:
        """Encode the slot on the CPU: users write to it outside of passes."""
        with self._lock:
            if self._slot is None or not self._has_values:
                raise StateError(f"{self.name} holds no memory that could have been written")
            view = self._slot.tensor[: self.nbytes]
        self._changing().copy_(view)
        self.mark_host_dirty()

    # ---------------------------------------------------------------- host side
    def host_tensor(self) -> torch.Tensor:
        values = self._changing()
        self._codec.decode(self._home.host_tensor(), values)
        return values

    def host_blank(self) -> torch.Tensor:
        values, self._is_new = self._changing(), True
        return values

    def _changing(self) -> torch.Tensor:
        self._is_new = False
        return self._links.host_copy.lend(self)

    def mark_host_dirty(self) -> None:
        values = self._links.host_copy.take_back(self)
        if self._is_new:
            stored = self._home.host_blank()
            self._codec.encode(values, stored)
        else:
            stored = self._home.host_tensor()
            try:
                self._codec.update(values, stored)
            except BaseException:
                del stored
                self._refresh()  # what was refused is not there
                raise
        self._home.mark_host_dirty()
        del stored
        self._refresh()

    def _refresh(self) -> None:
        """Decode the home's codes into the slot, if there is one."""
        with self._lock:
            held = self._slot if self._has_values else None
            view = None if held is None else held.tensor[: self.nbytes]
        if view is not None:
            self._codec.decode(self._home.tensor(), view)
