# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, RET505 - what is fixed at compile time is written so in Triton
"""The Triton kernel of `kernels.gpu.triton_gradients`; see there.

The order of a block's sum is that of `kernels.cpu.gradients`: 32 lanes, each going down the block's
rows by fused multiply-adds in fp64, then the lanes in halves. It suits a GPU: a program is one
warp, a lane is a thread's register, and a row is one coalesced access. What the chain of dependent
additions would cost is latency of memory, and that is hidden by loading UNROLL rows before the
first of them is added.
"""

import triton
import triton.language as tl

from offload.kernels.cpu.gradients import SUM_LANES, Action
from offload.kernels.floats import NORM_BLOCK
from offload.kernels.gpu.triton_ops import decode, encode, load, store

COPY = tl.constexpr(int(Action.COPY))
ADD = tl.constexpr(int(Action.ADD))
LANES = tl.constexpr(SUM_LANES)
ROWS = tl.constexpr(NORM_BLOCK // SUM_LANES)


@triton.jit
def _fetch(
    dst, src, offsets, numel,
    ACTION: tl.constexpr, DST: tl.constexpr, SRC: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A row of the gradient, or with ADD its sum with what is there."""
    raw = load(src, offsets, numel, WHOLE)
    if ACTION == ADD:
        return decode(load(dst, offsets, numel, WHOLE), DST) + decode(raw, SRC)
    else:
        return raw


@triton.jit
def _deliver(
    dst, row, offsets, numel,
    ACTION: tl.constexpr, DST: tl.constexpr, SRC: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Store what `_fetch` returned; returns the values as stored."""
    if ACTION == ADD:
        store(dst, offsets, row, numel, WHOLE)
        return row
    elif DST == SRC:  # bit for bit
        store(dst, offsets, row, numel, WHOLE)
        return decode(row, SRC)
    else:
        stored = encode(decode(row, SRC), DST)
        store(dst, offsets, stored, numel, WHOLE)
        return decode(stored, DST)


@triton.jit
def _rows(
    total, dst, src, offsets, numel, ACTION: tl.constexpr, DST: tl.constexpr, SRC: tl.constexpr,
    UNROLL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Process UNROLL rows: all loads first, then row by row the stores and sums."""
    rows = ()
    for row in tl.static_range(UNROLL):
        fetched = _fetch(dst, src, offsets + row * LANES, numel, ACTION, DST, SRC, WHOLE)
        rows = rows + (fetched,)  # type: ignore[assignment] # noqa: RUF005 - no *rows in Triton
    for row in tl.static_range(UNROLL):
        place = offsets + row * LANES
        wide = _deliver(dst, rows[row], place, numel, ACTION, DST, SRC, WHOLE).to(tl.float64)
        total = tl.fma(wide, wide, total)
    return total


@triton.jit
def _halve(lanes, HALF: tl.constexpr):
    """Lane k + HALF added to lane k: a sum of two has no order."""
    return tl.sum(tl.reshape(lanes, (2, HALF)), axis=0)


@triton.jit(do_not_specialize=["numel"])
def gradient_kernel(
    dst, src, partials, numel: tl.int64,
    ACTION: tl.constexpr, DST: tl.constexpr, SRC: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One program of one warp per block of NORM_BLOCK elements."""
    block = tl.program_id(0).to(tl.int64)
    start = block * (ROWS * LANES)
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.float64)
    if start + ROWS * LANES <= numel:
        for row in range(0, ROWS, UNROLL):
            offsets = start + row * LANES + lane
            total = _rows(total, dst, src, offsets, numel, ACTION, DST, SRC, UNROLL, True)
    else:
        while start < numel:
            total = _rows(total, dst, src, start + lane, numel, ACTION, DST, SRC, UNROLL, False)
            start += UNROLL * LANES
    lanes = _halve(_halve(_halve(_halve(_halve(total, 16), 8), 4), 2), 1)
    tl.store(partials + block + tl.arange(0, 1), lanes)
