"""Pinning of host memory for an accelerator, piece by piece as it is first used.

    ├─ pinned ─┤├─ pinned ─┤├─ pinned ─┤├───────── not used yet: no pages, no RAM ─────────┤
    extents: they end at addresses that are multiples of `EXTENT_NBYTES`

To pin memory touches all of its pages, at about 4 GiB/s: a budget pinned as a whole would take all
of that RAM, and half a minute for 128 GiB, for a model of any size.

No copy may reach from one registered range into another, or into memory that is not registered:
CUDA refuses it as an invalid argument. (Its manual, "API synchronization behavior", asks for memory
that is "entirely registered"; that two neighbours are not was seen by SGLang, pull request 36798.)
Leases are of any size, so no extents could be laid out that none of them crosses. Hence borders
follow a rule that needs no table, and `pieces` cuts any range there, whatever its owner.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from offload.tiers import accelerator
from offload.tiers.units import format_bytes

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("offload")

# A small model pins no more than one, in a sixteenth of a second. A terabyte is 4,096 of them, in
# which the driver looks up the address of every copy. A piece of that size takes 5 ms to copy, so
# that it costs nothing to start another. (Drivers from R580 on refuse 512 GiB or more at once.)
EXTENT_NBYTES = 256 << 20


def pieces(address: int, nbytes: int) -> Iterator[slice]:
    """`[0, nbytes)` of the memory at `address`, cut where extents end."""
    start = 0
    while start < nbytes:
        stop = min(nbytes, start + EXTENT_NBYTES - (address + start) % EXTENT_NBYTES)
        yield slice(start, stop)
        start = stop


class Pins:
    """The extents of one address range that are pinned for `device`. Thread-safe."""

    def __init__(self, address: int, nbytes: int, device: torch.device) -> None:
        self._address = address
        self._extents = list(pieces(address, nbytes))
        self._device = device
        self._pinned: set[int] = set()  # by index
        self._failed = False
        self._lock = threading.Lock()

    @property
    def complete(self) -> bool:
        """Whether all that was used is pinned, and anything was."""
        return bool(self._pinned) and not self._failed

    @property
    def nbytes(self) -> int:
        return sum(self._extents[i].stop - self._extents[i].start for i in list(self._pinned))

    def use(self, start: int, stop: int) -> None:
        """Pin the parts of `[start, stop)` that are not pinned yet. The first failure is logged,
        and what is not pinned then stays so: it is copied from and to all the same, slower."""
        with self._lock:
            for index in self._indices(start, stop):
                if self._failed:
                    return
                if index not in self._pinned:
                    self._pin(index)

    def _indices(self, start: int, stop: int) -> range:
        before = self._address // EXTENT_NBYTES
        first, last = (
            (self._address + offset) // EXTENT_NBYTES - before for offset in (start, stop - 1)
        )
        return range(first, last + 1)

    def _pin(self, index: int) -> None:
        extent, kind = self._extents[index], accelerator.of(self._device)
        nbytes = extent.stop - extent.start
        reason = kind.register(self._address + extent.start, nbytes, self._device)
        if reason is None:
            self._pinned.add(index)
            return
        self._failed = True
        _log.warning(
            "host tier: %s could not be pinned (%s), %s are: copies between the rest and the %s "
            "device will be slower; lower budget.host or raise `ulimit -l`",
            format_bytes(nbytes), reason, format_bytes(self.nbytes), kind.title,
        )  # fmt: skip

    def close(self) -> None:
        """Unpin everything, for good. Raises an error of one of the calls."""
        self._failed = True
        self.release()

    def release(self) -> None:
        """Unpin everything until it is used again. Raises an error of one of the calls."""
        with self._lock:
            unregister, pinned = accelerator.of(self._device).unregister, list(self._pinned)
            self._pinned.clear()
            with ExitStack() as all_of_them:  # also where the device has failed
                for index in pinned:
                    start = self._address + self._extents[index].start
                    all_of_them.callback(unregister, start, self._device)
