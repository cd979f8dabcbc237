"""Anonymous memory that a forked child does not share, except for the parts that are in view.

After a fork, parent and child share their pages until one of them writes: while a DataLoader's
worker lives, whatever the parent rewrites is copied first, and the RAM of all states in host memory
doubles. (Pinned pages are copied at the fork itself, so that a device goes on writing to the
parent's.) So the pages here stay with the parent. In the child:

    seen        a tensor beside the lease's own views it (a parameter used in place, something that
                a user keeps): inherited as usual, with the values that it had when the child was
                forked
    not seen    zeros, which are never read: the tensors that lead there refuse every use

The child keeps the addresses (MADV_WIPEONFORK, not MADV_DONTFORK). In a hole it would soon map
other memory of its own, which the end of this object there would then unmap.
"""

import bisect
import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.tiers.anonymous_memory import AnonymousMemory
from offload.tiers.errors import StateError
from offload.tiers.units import round_up

_MADV_WIPEONFORK, _MADV_KEEPONFORK = 18, 19  # Linux 4.14; the mmap module does not name them
# More of them than this are not told apart: each may cost the kernel two mappings of 65,530.
_MAX_RANGES = 1000

Range = tuple[int, int]  # start and stop, in bytes


class _LeftBehind(torch.Tensor):
    """A tensor in a forked child whose bytes have stayed with the parent."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise StateError(
            f"this memory belongs to the process that {os.getpid()} was forked from: use the model "
            "and the engine there alone (what a DataLoader's workers run must not touch them), or "
            "make an engine after the fork"
        )


class _Given:
    """A tensor that was given out: the start of a storage of its own. Keeps neither."""

    __slots__ = ("_alone", "_storage", "_tensor", "range")

    def __init__(self, tensor: torch.Tensor, where: Range) -> None:
        self.range = where
        self._tensor = weakref.ref(tensor)
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._alone = self._uses

    @property
    def _uses(self) -> int:
        """The number of tensors that view the storage, in some versions of PyTorch including its
        Python object; 0 once it is gone. Asking adds no use, which `Lease.in_use` might see."""
        return int(torch._C._storage_Use_Count(self._storage.cdata))

    def is_gone(self) -> bool:
        return self._uses == 0

    def is_seen(self) -> bool:
        """Whether any tensor views the storage beside the one that was given out."""
        return self._uses > self._alone - (self._tensor() is None)

    def leave_behind(self) -> None:
        tensor = self._tensor()
        if tensor is not None:
            tensor.__class__ = _LeftBehind


class HostRegion(AnonymousMemory):
    """An anonymous memory region that lives as long as any tensor over it."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self._lock = threading.Lock()
        self._given: list[_Given] = []
        self._many = 64  # from so many on, those that are gone are looked for
        self._kept: list[Range] = []  # that a child inherits; during a fork
        if self.advise(_MADV_WIPEONFORK, "to keep pages from forked children"):
            with _forking:
                _regions.add(self)

    @property
    def address(self) -> int:
        return int(torch.frombuffer(self, dtype=torch.uint8, count=1).data_ptr())

    @torch.inference_mode(False)  # a lease taken in an evaluation may serve training later on
    def tensor(self, start: int, stop: int) -> torch.Tensor:
        """Bytes `[start, stop)`, 1D uint8, with a storage of its own."""
        made = torch.frombuffer(self, dtype=torch.uint8, offset=start, count=stop - start)
        with self._lock:
            self._given.append(_Given(made, (start, stop)))
            if len(self._given) >= self._many:
                self._given = [given for given in self._given if not given.is_gone()]
                self._many = len(self._given) * 5 // 4 + 64
        return made

    def give_back(self) -> None:
        """Give back the RAM of all that is not viewed elsewhere: it is not read any more, although
        the tensors that were given out may live on. What other tensors view keeps its values."""
        with self._lock:
            end = 0
            for start, stop in [*self._seen(), (len(self), len(self))]:
                self.drop(end, start)
                end = stop

    def advise_small_pages(self, start: int) -> None:
        """Disable huge pages behind `start`: a lease there costs no more RAM than its own pages."""
        first = round_up(start, mmap.PAGESIZE)
        if hasattr(mmap, "MADV_NOHUGEPAGE") and first < len(self):
            with suppress(OSError):  # a kernel without huge pages
                self.madvise(mmap.MADV_NOHUGEPAGE, first, len(self) - first)

    def drop(self, start: int, stop: int) -> bool:
        """Drop the RAM of the whole pages of `[start, stop)`, whose values no longer count. False
        if it stays."""
        first, last = round_up(start, mmap.PAGESIZE), stop // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            try:
                self.madvise(mmap.MADV_DONTNEED, first, last - first)
            except OSError:  # locked in memory (mlockall): it goes with its tensors
                return False
        return True

    def _seen(self) -> list[Range]:
        """The ranges, in whole pages, that tensors other than those given out view."""
        return _joined(given.range for given in list(self._given) if given.is_seen())

    # ---------------------------------------------------------------- around a fork
    def keep_what_is_seen(self) -> None:
        """Let a child that is forked now inherit the ranges that are viewed."""
        self._kept = []
        seen = self._seen()
        for start, stop in seen if len(seen) <= _MAX_RANGES else [(0, len(self))]:
            self.madvise(_MADV_KEEPONFORK, start, stop - start)
            self._kept.append((start, stop))

    def keep_nothing(self) -> None:
        """Stop keeping ranges for forked children, until the next fork."""
        kept, self._kept = self._kept, []
        for start, stop in kept:
            self.madvise(_MADV_WIPEONFORK, start, stop - start)

    def leave_behind(self) -> None:
        """Mark, in the child, the tensors that it did not inherit: using them is an error."""
        for given in self._given:
            if not _within(given.range, self._kept):
                given.leave_behind()


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """The ranges in whole pages, with adjacent and overlapping ones merged."""
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        begin, end = start // mmap.PAGESIZE * mmap.PAGESIZE, round_up(stop, mmap.PAGESIZE)
        if joined and begin <= joined[-1][1]:
            begin, before = joined.pop()
            end = max(before, end)
        joined.append((begin, end))
    return joined


def _within(range_: Range, kept: list[Range]) -> bool:
    before = bisect.bisect_right(kept, range_[0], key=lambda each: each[0])
    return before > 0 and range_[1] <= kept[before - 1][1]


_regions: weakref.WeakSet[HostRegion] = weakref.WeakSet()
# Held from just before a fork until just after. One that a Ctrl-C has left held can be taken again.
_forking = threading.RLock()


def _before() -> None:
    _forking.acquire()
    for region in list(_regions):
        region.keep_what_is_seen()


def _after_in_parent() -> None:
    try:
        for region in list(_regions):
            region.keep_nothing()
    finally:
        _forking.release()


def _after_in_child() -> None:
    global _forking
    _forking = threading.RLock()
    for region in list(_regions):
        region.leave_behind()
        region.keep_nothing()


os.register_at_fork(
    before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
