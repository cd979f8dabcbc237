"""Chunk size and prefetch depth, if the configuration leaves them open. Neither changes results.

A chunk is long enough that starting its transfer costs little in comparison, and short enough that
the buffers of the pipeline are a small part of the budget. Prefetching keeps as many bytes in
flight as a device needs to stay busy while the CPU is busy, too.
"""

import math
from collections.abc import Sequence

MIN_CHUNK_NUMEL = 1 << 16
# A transfer of so many parameters with their record takes 10 ms at 3 GB/s. A request costs about
# 150 microseconds of Python, a chunk makes five, and the model's thread waits for the interpreter
# meanwhile: chunks of a quarter of this cost a 151 M step on two cores a tenth of its time.
_CHUNK_NUMEL, _SMALL_CHUNK_NUMEL = 1 << 21, 1 << 20
# The buffers that chunks stream through may take this part of the host budget.
_STAGING_SHARE = 0.13  # an eighth and what rounding to pages adds
# Bytes on their way: measured to be enough beside a busy optimizer; half of it loses a third of the
# bandwidth.
_IN_FLIGHT_NBYTES = 48 << 20
_MIN_PREFETCH, USUAL_PREFETCH, _MAX_PREFETCH = 2, 4, 16
# What never streams is cut for the threads alone. Each takes its share of every chunk from the
# interpreter, one after the other, and the more threads there are, the sooner a share is done: on
# 16 cores beside an H100 a call cost 1.6 ms beside its elements: 38 % of its time at 1 << 24 of
# them, 13 % at 1 << 26.
_CHUNK_PER_THREAD_NUMEL, _MAX_IN_MEMORY_NUMEL = 1 << 18, 1 << 26
# Seven buffers of such chunks, on the device or the host, hold 6 bytes per element at most: a
# weight and a gradient, which may be a sum in fp32. They take a small part of the smaller budget.
_COPIED_BYTES_EACH, _COPIED_SHARE, _SMALL_COPIED_NUMEL = 7 * 6, 1 / 32, 1 << 22
# Parameters of models smaller than this pass in a moment, and speeds are not measured for them.
WORTH_MEASURING_NBYTES = 256 << 20


def streamed_chunk(parameters_nbytes: int, bytes_each: float, host_budget: int) -> int:
    """The elements per chunk if chunks stream from files, a power of two. `bytes_each` is what the
    buffers hold per element together."""
    if parameters_nbytes < WORTH_MEASURING_NBYTES:
        return _SMALL_CHUNK_NUMEL
    fitting = _power_of_two_below(max(1.0, host_budget * _STAGING_SHARE / bytes_each))
    return max(MIN_CHUNK_NUMEL, min(_CHUNK_NUMEL, fitting))


def chunk_in_memory(threads: int, copied_budget: int | None = None) -> int:
    """The elements per chunk if chunks are in memory alone, a power of two. With `copied_budget`
    parts are copied between host and device, through buffers of a chunk's size within it."""
    numel = min(_MAX_IN_MEMORY_NUMEL, _CHUNK_PER_THREAD_NUMEL * threads**2)
    if copied_budget is not None:
        fitting = int(copied_budget * _COPIED_SHARE / _COPIED_BYTES_EACH)
        numel = min(numel, max(_SMALL_COPIED_NUMEL, fitting))
    return max(_SMALL_CHUNK_NUMEL, _power_of_two_below(numel))


def prefetch_depth(group_nbytes: Sequence[int]) -> int:
    """The number of groups to fetch ahead, for groups whose parameters are of these sizes."""
    if sum(group_nbytes) < WORTH_MEASURING_NBYTES:
        return USUAL_PREFETCH
    usual = sorted(group_nbytes)[len(group_nbytes) // 2]
    depth = math.ceil(_IN_FLIGHT_NBYTES / max(1, usual))
    return max(_MIN_PREFETCH, min(_MAX_PREFETCH, depth))


def _power_of_two_below(value: float) -> int:
    return 1 << (int(value).bit_length() - 1)
