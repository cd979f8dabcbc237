"""The registered backends, with a check of those that work here and reasons for the others."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offload.swap.io.io_backend import IOBackend
from offload.swap.io.io_request import Operation
from offload.swap.io.swap_file import SwapFile
from offload.swap.io.threads_backend import ThreadsBackend
from offload.tiers.errors import ConfigError, OffloadError, StorageError
from offload.tiers.tier import PAGE_NBYTES

_PROBE_NBYTES = 4 * PAGE_NBYTES


@dataclass(frozen=True, slots=True)
class BackendReport:
    """The result of `probe_backends` for one backend."""

    name: str
    available: bool
    reason: str  # why not, or what it runs with
    o_direct: bool  # whether the directory's files bypass the page cache


def _threads() -> type[IOBackend]:
    return ThreadsBackend


def _libaio() -> type[IOBackend]:
    from offload.swap.io.libaio_backend import LibaioBackend  # optional: imported when asked for

    return LibaioBackend


# `auto` is the first: as fast as any with requests of some MiB, and works everywhere.
BACKENDS: Mapping[str, Callable[[], type[IOBackend]]] = {"threads": _threads, "libaio": _libaio}


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
