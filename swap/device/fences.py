"""Memory that changes hands while a stream still works in it.

The model's thread runs ahead of the GPU: a slot is given up when the last *call* that reads it has
returned, long before the last *read*. So an evicted range leaves a mark. The first copy or kernel
that overlaps the range, at any offset and size, waits on its stream for the marks there, and for
nothing else.

    range of the arena      ├── slot of layer 3 ──┤├── layer 4 ──┤
    given up, with marks    ├── read until e1 ────┤├─ until e2 ──┤
    lent again              ├ 5 ┤├──── layer 6 ────┤
    its first copy waits      e1     e1 and e2
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from offload.swap.device.streams import StreamEvent, mark_here
from offload.tiers.tier import Extent


@dataclass(frozen=True, slots=True)
class _Fence:
    start: int
    stop: int
    mark: StreamEvent


class Fences:
    """Marks by range of one arena, until they are done. Thread-safe."""

    def __init__(self) -> None:
        self._fences: list[_Fence] = []
        self._lock = threading.Lock()

    def retire(self, extent: Extent, marks: Iterable[StreamEvent]) -> None:
        """`extent` is given up (call it before its lease is freed); `marks` still work in it."""
        start, stop = extent.offset_bytes, extent.offset_bytes + extent.nbytes
        with self._lock:
            self._fences += [_Fence(start, stop, mark) for mark in marks if mark.event is not None]
            self._forget_done()

    def claim(self, extent: Extent) -> tuple[StreamEvent, ...]:
        """The marks that the first writer of a newly leased range has to wait for.

        They need not be retired again with the memory: they stay until they are done.
        """
        start, stop = extent.offset_bytes, extent.offset_bytes + extent.nbytes
        with self._lock:
            self._forget_done()
            return tuple(f.mark for f in self._fences if f.start < stop and start < f.stop)

    def _forget_done(self) -> None:
        self._fences = [fence for fence in self._fences if not fence.mark.done()]


class Reader(Protocol):
    """A slot's holder, of which the model's stream was given views."""

    def still_read(self) -> bool:
        """Whether any view of the slot is alive."""
        ...

    def read_until(self, mark: StreamEvent) -> None:
        """Everything that reads the views given out so far is before `mark`."""
        ...


class OpenReads:
    """Slots that the model's stream is reading or was given to read, as far as is known.

    A view's death says that nothing more will be queued that reads it, so a mark made right after
    it has the last reader before it and nothing that comes later. Looking at each use of a group
    finds it at most one group late. Under the pool's lock, on threads of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._readers: dict[int, Reader] = {}

    def note(self, reader: Reader) -> None:
        """A view of the reader's slot was given out."""
        self._readers[id(reader)] = reader

    def mark(self) -> None:
        """One mark for all slots that cannot be read any more."""
        over = [reader for reader in self._readers.values() if not reader.still_read()]
        if over:
            mark = mark_here(self._device)
        for reader in over:
            del self._readers[id(reader)]
            reader.read_until(mark)

    def mark_now(self, reader: Reader) -> None:
        """Mark the reader's slot, which is given up or written to: all its readers are queued."""
        if id(reader) not in self._readers:
            return
        if not reader.still_read():
            del self._readers[id(reader)]
        reader.read_until(mark_here(self._device))
