"""Slots of device memory, and the streams that bytes reach it by: `DeviceSlot` and `Links`.

The model's stream reads a slot, copies fill it, and both go on after the call that began them has
returned. So a slot keeps marks of the work in its memory, and the next slot in that memory waits
for them (`Fences`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from offload.swap.device.fences import Fences
from offload.swap.device.streams import CopyStream, StreamEvent, keeping, mark_here
from offload.swap.states.slot import Slot
from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import HostCopy
from offload.swap.threads.transfer import Transfer
from offload.tiers.ledger import StateClass
from offload.tiers.memory_tier import Lease


@dataclass(frozen=True, slots=True)
class Links:
    """The copy streams between host and device, and the reads under way in the device's memory."""

    to_device: CopyStream
    to_host: CopyStream
    device: torch.device = field(default=torch.device("cpu"))
    fences: Fences = field(default_factory=Fences)
    # memory on the host for who loads states or reads them out, one of each kind at a time
    host_copy: HostCopy = field(default_factory=HostCopy)
    record_copy: HostCopy = field(default_factory=HostCopy)

    def close(self) -> None:
        try:
            self.to_device.close()
        finally:
            self.to_host.close()


class OpenReads:
    """Slots that the model's stream is reading or was given to read, as far as is known.

    A view's death says that nothing more will be queued that reads it, so a mark made right after
    it has the last reader before it and nothing that comes later. Looking at each use of a group
    finds it at most one group late. Under the pool's lock, on threads of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._readers: dict[int, DeviceSlot] = {}

    def note(self, reader: DeviceSlot) -> None:
        """A view of the reader's slot was given out."""
        self._readers[id(reader)] = reader

    def mark(self) -> None:
        """One mark for all slots that cannot be read any more."""
        over = [reader for reader in self._readers.values() if not reader.in_use()]
        if over:
            mark = mark_here(self._device)
        for reader in over:
            del self._readers[id(reader)]
            reader.read_until(mark)

    def mark_now(self, reader: DeviceSlot) -> None:
        """Mark the reader's slot, which is given up or written to: all its readers are queued."""
        if id(reader) not in self._readers:
            return
        if not reader.in_use():
            del self._readers[id(reader)]
        reader.read_until(mark_here(self._device))


class DeviceSlot(Slot):
    """A slot whose memory the model's stream reads. Other work in it is remembered by
    marks."""

    def __init__(
        self, name: str, nbytes: int, state_class: StateClass, pool: SlotPool,
        next_use: Callable[[], float], links: Links, reads: OpenReads,
    ) -> None:  # fmt: skip
        """`pool` is a pool of device memory; `reads` are the reads of all its slots."""
        super().__init__(name, nbytes, state_class, pool, next_use)
        self.links = links
        self.reads = reads
        self.arrival = StreamEvent()  # after the last copy into the slot
        self._before_write: tuple[StreamEvent, ...] = ()  # until something else is written there

    def hold(self, lease: Lease) -> None:
        if self.lease is None:
            self._before_write = self.links.fences.claim(lease.extent)
        super().hold(lease)

    def evict(self) -> None:
        self.reads.mark_now(self)
        if self.lease is not None:
            self.links.fences.retire(self.lease.extent, (*self._before_write, self.arrival))
        super().evict()

    def _forget_moves(self) -> None:
        super()._forget_moves()
        self.arrival = StreamEvent()
        self._before_write = ()

    def has_arrived(self) -> bool:
        return self.arrival.done()

    def note_read(self) -> None:
        self.reads.note(self)

    def mark_reads(self) -> None:
        with self.lock:
            self.reads.mark()

    def read_until(self, mark: StreamEvent) -> None:
        """Note that everything that reads the views given out so far is before `mark`."""
        self._before_write = mark.replacing(self._before_write)

    def begin_write(self) -> None:
        for mark in self._before_write:
            mark.before_compute()
        self.note_read()

    def fill(self, source: torch.Tensor, spans: Iterable[slice]) -> Transfer[None]:
        """Start copying spans of `source`, host memory, to the slot. No thread waits for fresh
        memory: a copy waits for the last reader of what the memory held before. `source` is kept
        until the transfer is done."""
        assert self.lease is not None, "no memory is held"
        self.reads.mark_now(self)
        before, self._before_write = self._before_write, ()
        for span in spans:
            target = self.lease.tensor[span]
            self.arrival = self.links.to_device.copy(target, source[span], after=before)
        what = f"{self.name} on its way to the device"
        return self.links.to_device.transfer(self.arrival, what, keeping(source))
