"""The bytes of live storages, tracked from operation to operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

# From this size on glibc takes every block from the system by itself (DEFAULT_MMAP_THRESHOLD_MAX).
HEAP_LIMIT_NBYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Alive:
    """A number of bytes in storages."""

    nbytes: int = 0
    heap_nbytes: int = 0  # of those below `HEAP_LIMIT_NBYTES`

    @classmethod
    def of(cls, nbytes: int) -> Alive:
        """Return the bytes of one storage of `nbytes`."""
        return cls(nbytes, nbytes if nbytes < HEAP_LIMIT_NBYTES else 0)

    def __add__(self, other: Alive) -> Alive:
        return Alive(self.nbytes + other.nbytes, self.heap_nbytes + other.heap_nbytes)

    def __sub__(self, other: Alive) -> Alive:
        return Alive(self.nbytes - other.nbytes, self.heap_nbytes - other.heap_nbytes)

    def __mul__(self, times: int) -> Alive:
        return Alive(self.nbytes * times, self.heap_nbytes * times)


class LiveBytes:
    """Counts each storage once, from the operation that made it until nothing refers to it.

    Storages that existed before (parameters, inputs) are not counted.
    """

    def __init__(self, grown: Callable[[], None]) -> None:
        """`grown` is called whenever the number of bytes has increased."""
        self.now = Alive()
        self._grown = grown
        self._counts = True
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._nbytes: dict[int, int] = {}

    def made(self, results: Iterable[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
        """Register the `results` of an operation, which received the tensors in `given`."""
        before = self.now
        for tensor in results:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._alive:
                is_old = any(other.untyped_storage()._cdata == key for other in given)
                self._add(storage, storage.nbytes() if self._counts and not is_old else 0)
        if self.now.nbytes > before.nbytes:
            self._grown()

    @contextmanager
    def counting(self, counts: bool) -> Iterator[None]:
        """Set whether storages made inside are counted."""
        before, self._counts = self._counts, counts
        try:
            yield
        finally:
            self._counts = before

    def nbytes_of(self, tensor: torch.Tensor) -> int:
        """The bytes counted for the storage of `tensor`."""
        return self._nbytes.get(tensor.untyped_storage()._cdata, 0)

    def forget(self) -> None:
        """Start again from zero: storages that are alive now are not counted."""
        self.now = Alive()
        for key in self._nbytes:
            self._nbytes[key] = 0

    def _add(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = storage._cdata
        self._alive[key] = weakref.ref(storage, partial(self._died, key))
        self._nbytes[key] = nbytes
        self.now += Alive.of(nbytes)

    def _died(self, key: int, _: Any) -> None:
        del self._alive[key]
        self.now -= Alive.of(self._nbytes.pop(key))
