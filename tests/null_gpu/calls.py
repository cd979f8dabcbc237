"""The null GPU's memory and failures, in a process that it was loaded into."""

import ctypes
from functools import cache

MEMORY_ERROR = 2  # cudaErrorMemoryAllocation
BLOCKING = (
    "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaStreamSynchronize",
)  # fmt: skip


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.bytes_at.restype = ctypes.c_void_p
    library.bytes_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


def fail_next(name: str, error: int, times: int = 1) -> None:
    """The next `times` calls of an entry point do nothing and return `error`."""
    _library().null_gpu_fail(name.encode(), error, times)


def blocking_calls() -> int:
    """The calls that wait for the device, by threads that `count_this_thread` was called in."""
    return sum(_library().null_gpu_counted(name.encode()) for name in BLOCKING)


def count_this_thread() -> None:
    _library().null_gpu_count()


def device_bytes(address: int, nbytes: int) -> bytes:
    """The bytes that a kernel would read there now."""
    return ctypes.string_at(_library().bytes_at(address, nbytes), nbytes)
