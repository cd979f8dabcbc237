"""The speed of a path: the weights for striping, and the figures for a plan."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from offload.swap.io.io_backend import IOBackend
from offload.swap.io.io_request import Operation
from offload.swap.io.io_watch import TIMEOUT_S
from offload.swap.io.swap_file import SwapFile
from offload.swap.io.threads_backend import ThreadsBackend
from offload.swap.threads.transfer import Transfer, all_of
from offload.tiers.anonymous_memory import AnonymousMemory

_BLOCK_NBYTES = 8 << 20
_ROUNDS = 2  # the first writes to fresh blocks, which no later write of a run does


class Bandwidth(NamedTuple):
    read_bytes_per_s: float
    write_bytes_per_s: float


def measure_bandwidth(
    path: str | os.PathLike[str], nbytes: int = 64 << 20, *, timeout_s: float = TIMEOUT_S
) -> Bandwidth:
    """The better of two rounds over a swap file of `nbytes` in `path`, 8 MiB at a time.

    Blocks for about four times `nbytes` of traffic. Short on purpose: on a device with a cache it
    flatters, but evenly, which is what shares need. Raises what `SwapFile` raises.
    """
    with (
        ThreadsBackend(timeout_s=timeout_s) as backend,
        SwapFile(path, timeout_s=timeout_s) as file,
    ):
        return _measure(file, backend, max(nbytes // _BLOCK_NBYTES, 1) * _BLOCK_NBYTES)


def _measure(file: SwapFile, backend: IOBackend, nbytes: int) -> Bandwidth:
    file.reserve(nbytes)
    buffer = memoryview(AnonymousMemory(nbytes))  # aligned like the tiers' memory
    # Noise, so that no device compresses it; it also faults the pages in.
    noise = os.urandom(1 << 20)
    for start in range(0, nbytes, len(noise)):
        buffer[start : start + len(noise)] = noise
    write_s = min(_pass(file, backend, buffer, write=True) for _ in range(_ROUNDS))
    read_s = min(_pass(file, backend, buffer, write=False) for _ in range(_ROUNDS))
    return Bandwidth(nbytes / read_s, nbytes / write_s)


def _pass(file: SwapFile, backend: IOBackend, buffer: memoryview, *, write: bool) -> float:
    """Seconds to move all of `buffer`."""
    operation = Operation.WRITE if write else Operation.READ
    started = time.perf_counter()
    moves: list[Transfer[None]] = [
        backend.submit(operation, file.fd, buffer[at : at + _BLOCK_NBYTES], at, path=file.path)
        for at in range(0, buffer.nbytes, _BLOCK_NBYTES)
    ]
    all_of(moves).wait()
    return time.perf_counter() - started
