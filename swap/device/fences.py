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

import threading
from collections.abc import Iterable

from offload.swap.device.streams import StreamEvent
from offload.tiers.tier import Extent


class Fences:
    """Marks by range of one arena, until they are done. Thread-safe."""

    def __init__(self) -> None:
        self._fences: list[tuple[int, int, StreamEvent]] = []  # start, stop, mark
        self._lock = threading.Lock()

    def retire(self, extent: Extent, marks: Iterable[StreamEvent]) -> None:
        """`extent` is given up (call it before its lease is freed); `marks` still work in it."""
        start, stop = extent.offset_bytes, extent.offset_bytes + extent.nbytes
        with self._lock:
            self._fences += [(start, stop, mark) for mark in marks if mark.event is not None]
            self._forget_done()

    def claim(self, extent: Extent) -> tuple[StreamEvent, ...]:
        """The marks that the first writer of a newly leased range has to wait for.

        They need not be retired again with the memory: they stay until they are done.
        """
        start, stop = extent.offset_bytes, extent.offset_bytes + extent.nbytes
        with self._lock:
            self._forget_done()
            return tuple(mark for at, end, mark in self._fences if at < stop and start < end)

    def _forget_done(self) -> None:
        self._fences = [fence for fence in self._fences if not fence[2].done()]
