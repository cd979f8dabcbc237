"""Chunk size and prefetch depth from measured bandwidth, if the configuration leaves them open.

A chunk is long enough that starting its transfer costs little in comparison, and short enough that
the buffers of the pipeline are a small part of the budget. Prefetching keeps as many bytes in
flight as a device needs to stay busy while the CPU is busy, too. Neither changes results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.swap.io.measure import Bandwidth

# One transfer of a chunk should take this long. A request costs about 150 microseconds of Python, a
# chunk makes five, and the model's thread waits for the interpreter meanwhile: chunks of a quarter
# of this cost a 151 M step on two cores a tenth of its time.
_CHUNK_S = 10e-3
LEAST_CHUNK_NUMEL, _MOST_CHUNK_NUMEL = 1 << 16, 1 << 22
# The buffers that chunks stream through may take this part of the host budget.
_STAGING_SHARE = 0.13  # an eighth and what rounding to pages adds
# Bytes on their way: measured to be enough beside a busy optimizer; half of it loses a third of the
# bandwidth. A faster device needs more, for the time it takes to notice and ask again.
_IN_FLIGHT_NBYTES = 48 << 20
_IN_FLIGHT_S = 15e-3
_LEAST_PREFETCH, _MOST_PREFETCH = 2, 16
# What never streams is cut for the threads alone. Each takes its share of every chunk from the
# interpreter, one after the other, and the more threads there are, the sooner a share is done: on
# 16 cores a step of a million elements at a time ran at a fifth of the memory's speed.
_CHUNK_PER_THREAD_NUMEL, _MOST_IN_MEMORY_NUMEL = 1 << 18, 1 << 24
# Models smaller than this are not worth measuring for.
WORTH_MEASURING_NBYTES = 256 << 20


Measure = Callable[[], Bandwidth]


@dataclass(frozen=True, slots=True)
class Tuning:
    """The chosen chunk size and prefetch depth."""

    chunk_numel: int
    prefetch: int


UNMEASURED = Tuning(chunk_numel=1 << 20, prefetch=4)  # right for 3 GB/s


@dataclass(frozen=True, slots=True)
class Streamed:
    """The data that streams through a model's tiers; bytes per parameter cover all that moves."""

    group_nbytes: Sequence[int]  # parameters of each group
    bytes_per_parameter: float
    buffers: int
    host_budget: int


def rated_bandwidth(read_bytes_per_s: float, write_bytes_per_s: float) -> Measure:
    """Return a "measurement" of a bandwidth that is known from elsewhere, such as a data sheet."""
    bandwidth = Bandwidth(read_bytes_per_s, write_bytes_per_s)
    return lambda: bandwidth


def choose(streamed: Streamed, measure: Measure | None) -> Tuning:
    """Choose the chunk size and prefetch depth; `measure` is called only if it is worth it."""
    if measure is None or sum(streamed.group_nbytes) < WORTH_MEASURING_NBYTES:
        return UNMEASURED
    bandwidth = measure()
    return Tuning(chunk_numel(bandwidth, streamed), prefetch_depth(bandwidth, streamed))


def chunk_in_memory(threads: int, *, copied: bool) -> int:
    """The elements per chunk if chunks are in memory alone, a power of two. `copied`: parts are
    copied between host and device, through buffers of a chunk's size."""
    numel = _power_of_two_below(_CHUNK_PER_THREAD_NUMEL * threads**2)
    most = _MOST_CHUNK_NUMEL if copied else _MOST_IN_MEMORY_NUMEL
    return max(UNMEASURED.chunk_numel, min(most, numel))


def chunk_numel(bandwidth: Bandwidth, streamed: Streamed) -> int:
    """The elements per chunk, a power of two."""
    per_second = min(bandwidth.read_bytes_per_s, bandwidth.write_bytes_per_s)
    wanted = per_second * _CHUNK_S / streamed.bytes_per_parameter
    room = streamed.host_budget * _STAGING_SHARE / streamed.buffers
    fitting = room / streamed.bytes_per_parameter
    numel = _power_of_two_below(max(1.0, min(wanted * 1.5, fitting)))  # the nearest, not the lower
    return max(LEAST_CHUNK_NUMEL, min(_MOST_CHUNK_NUMEL, numel))


def prefetch_depth(bandwidth: Bandwidth, streamed: Streamed) -> int:
    """The number of groups to fetch ahead."""
    in_flight = max(_IN_FLIGHT_NBYTES, bandwidth.read_bytes_per_s * _IN_FLIGHT_S)
    sizes = sorted(streamed.group_nbytes)
    usual = sizes[len(sizes) // 2] if sizes else 1
    return max(_LEAST_PREFETCH, min(_MOST_PREFETCH, math.ceil(in_flight / max(1, usual))))


def _power_of_two_below(value: float) -> int:
    return 1 << (int(value).bit_length() - 1)
