"""The registered backends, a check of those that work here, and the speed of a path."""

import math
import mmap
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offload.swap.io.io_backend import IOBackend
from offload.swap.io.requests_and_retries import Operation
from offload.swap.io.swap_file import SwapFile
from offload.swap.io.threads_backend import ThreadsBackend
from offload.swap.threads.transfer import Transfer, all_of
from offload.tiers.anonymous_memory import AnonymousMemory
from offload.tiers.errors import ConfigError, OffloadError, StorageError
from offload.tiers.tier import PAGE_NBYTES

_PROBE_NBYTES = 4 * PAGE_NBYTES
_MEASURED_NBYTES = 64 << 20
_BLOCK_NBYTES = 8 << 20
_ROUNDS = 2  # the first writes to fresh blocks, which no later write of a run does


@dataclass(frozen=True, slots=True)
class BackendReport:
    """The result of `probe_backends` for one backend."""

    name: str
    available: bool
    reason: str  # why not, or what it runs with
    o_direct: bool  # whether the directory's files bypass the page cache


def _libaio() -> type[IOBackend]:
    from offload.swap.io.libaio_backend import LibaioBackend  # optional: imported when asked for

    return LibaioBackend


# `auto` is the first: as fast as any with requests of some MiB, and works everywhere.
BACKENDS: Mapping[str, Callable[[], type[IOBackend]]] = {
    "threads": lambda: ThreadsBackend, "libaio": _libaio
}  # fmt: skip


def resolve_backend(name: str) -> str:
    """The name that `name` (`auto` included) stands for. Raises ConfigError if none does."""
    if name == "auto":
        return next(iter(BACKENDS))
    if name in BACKENDS:
        return name
    known = ", ".join(["auto", *BACKENDS])
    raise ConfigError(f"nvme.backend: {name!r} is unknown; choose one of {known}")


def open_backend(name: str = "auto", **options: Any) -> IOBackend:
    """A running backend; `options` are its constructor's (`workers`, ...).

    Never falls back in silence: raises UnsupportedError if the one asked for cannot run here,
    ConfigError for an unknown name.
    """
    return BACKENDS[resolve_backend(name)]()(**options)


def probe_backends(directory: str | os.PathLike[str]) -> list[BackendReport]:
    """Try each backend on a swap file in `directory`, by a real write and read.

    Blocks for some milliseconds each. Raises PathError if no swap file can be made there.
    """
    with SwapFile(directory) as file:
        file.reserve(_PROBE_NBYTES)
        return [_probe(name, file) for name in BACKENDS]


def _probe(name: str, file: SwapFile) -> BackendReport:
    try:
        with open_backend(name) as backend:
            _write_and_read(backend, file)
    except OffloadError as error:
        return BackendReport(name, available=False, reason=str(error), o_direct=file.o_direct)
    how = "O_DIRECT" if file.o_direct else "buffered: slower, uses RAM outside the budget"
    return BackendReport(name, available=True, reason=how, o_direct=file.o_direct)


def _write_and_read(backend: IOBackend, file: SwapFile) -> None:
    sent, received = (memoryview(mmap.mmap(-1, _PROBE_NBYTES)) for _ in range(2))
    sent[:] = os.urandom(_PROBE_NBYTES)
    backend.submit(Operation.WRITE, file.fd, sent, 0, path=file.path).wait()
    backend.submit(Operation.READ, file.fd, received, 0, path=file.path).wait()
    if received != sent:
        raise StorageError(f"{file.path}: other bytes were read than written")


def measured_speed(path: str | os.PathLike[str], timeout_s: float) -> float:
    """The speed of a path for striping, in bytes per second: the geometric mean of reading and
    writing, each the better of two rounds over a swap file of 64 MiB.

    Blocks for about four times that of traffic. Short on purpose: on a device with a cache it
    flatters, but evenly, which is what shares need. Raises what `SwapFile` raises.
    """
    buffer = memoryview(AnonymousMemory(_MEASURED_NBYTES))  # aligned like the tiers' memory
    # Noise, so that no device compresses it; it also faults the pages in.
    noise = os.urandom(1 << 20)
    for start in range(0, _MEASURED_NBYTES, len(noise)):
        buffer[start : start + len(noise)] = noise
    with (
        ThreadsBackend(timeout_s=timeout_s) as backend,
        SwapFile(path, timeout_s=timeout_s) as file,
    ):
        file.reserve(_MEASURED_NBYTES)
        write_s = min(_pass_s(Operation.WRITE, file, backend, buffer) for _ in range(_ROUNDS))
        read_s = min(_pass_s(Operation.READ, file, backend, buffer) for _ in range(_ROUNDS))
    return _MEASURED_NBYTES / math.sqrt(read_s * write_s)


def _pass_s(operation: Operation, file: SwapFile, backend: IOBackend, buffer: memoryview) -> float:
    started = time.perf_counter()
    moves: list[Transfer[None]] = [
        backend.submit(operation, file.fd, buffer[at : at + _BLOCK_NBYTES], at, path=file.path)
        for at in range(0, buffer.nbytes, _BLOCK_NBYTES)
    ]
    all_of(moves).wait()
    return time.perf_counter() - started
