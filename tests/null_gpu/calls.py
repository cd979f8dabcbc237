"""The null GPU's counters and failures, in a process that it was loaded into."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

MEMORY_ERROR = 2  # cudaErrorMemoryAllocation


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.null_gpu_counts.restype = ctypes.c_size_t
    library.null_gpu_counts.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    library.bytes_at.restype = ctypes.c_void_p
    library.bytes_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


def counts() -> Counter[str]:
    """How often each entry point was called so far, by all threads."""
    nbytes = _library().null_gpu_counts(None, 0) + 4096  # another thread may add names meanwhile
    text = ctypes.create_string_buffer(nbytes)
    _library().null_gpu_counts(text, nbytes)
    lines = (line.split() for line in text.value.decode().splitlines())
    return Counter({name: int(count) for name, count in lines})


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Filled at the end of the block with the calls in it."""
    found: Counter[str] = Counter()
    before = counts()
    yield found
    found.update(counts() - before)


def fail_next(name: str, error: int, times: int = 1) -> None:
    """The next `times` calls of an entry point do nothing and return `error`."""
    _library().null_gpu_fail(name.encode(), error, times)


def device_bytes(address: int, nbytes: int) -> bytes:
    """What a kernel would read there now."""
    return ctypes.string_at(_library().bytes_at(address, nbytes), nbytes)
