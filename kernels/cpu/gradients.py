"""Gradients on their way into an accumulator, with the norm and the non-finite check in the pass.

Each function walks the accumulator once and leaves, per block of `NORM_BLOCK` elements, the sum of
squares of the values it *stored* (after rounding to the accumulator's format) in `partials`, one
fp64 per block, the last block being the shorter one. The sum of all partials is the squared norm.
A block with an infinity or a NaN has a partial that is infinite or NaN, and finite elements always
have a finite one: 65536 squares of the largest fp32 are far below the largest fp64. So the norm is
also the overflow check.

Guarantee: partials have the same bits for any runner (it is handed whole blocks), alignment and
CPU. The order of a block's sum is fixed: element j goes to lane j % 32, by fma(x, x, lane) in fp64,
in which x * x is exact; then the lanes are added in halves: lane k + 16 to lane k below 16, then
lane k + 8 to lane k below 8, and so on. Add up the partials themselves with `math.fsum`: its result
is the exact sum rounded once, so that neither their order nor the buffer they came from matters.
The blocks start at each call's first element: a gradient cut into several calls at other places
than multiples of NORM_BLOCK has other partials.

Arrays must not overlap. 16-bit floats are uint16 bits, see `kernels.floats`. Rounding to a 16-bit
format is to nearest even, `kernels.cpu.convert`; additions are single fp32 additions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from offload.kernels.cpu import jit
from offload.kernels.cpu.lanes import F64, I64, STORAGE, WIDTH, Lanes, Value, interleave
from offload.kernels.floats import (
    NORM_BLOCK,
    Array,
    Float,
    Runner,
    check_input,
    check_output,
    norm_blocks,
    numel_of,
    serial,
)

SUM_LANES = 32  # partial sums within a block; fixed, since the bits of a partial follow from it
_FP32 = np.dtype(np.float32)
_FP64 = np.dtype(np.float64)


class Action(IntEnum):
    COPY = 0
    ADD = 1


def copy_gradient(
    dst: Array, src: Array, dst_float: Float, src_float: Float, partials: Array,
    run: Runner = serial,
) -> None:  # fmt: skip
    """dst = src, converted if the formats differ, and bit for bit if they do not."""
    numel = numel_of("dst", dst)
    check_output("dst", dst, dst_float.storage, numel)
    check_input("src", src, src_float.storage, numel)
    _run(Action.COPY | dst_float << 1 | src_float << 3, dst, src, partials, run)


def add_gradient(
    dst: Array, src: Array, src_float: Float, partials: Array, run: Runner = serial
) -> None:
    """dst += src, into an fp32 accumulator."""
    numel = numel_of("dst", dst)
    check_output("dst", dst, _FP32, numel)
    check_input("src", src, src_float.storage, numel)
    _run(Action.ADD | Float.FP32 << 1 | src_float << 3, dst, src, partials, run)


def _run(code: int, dst: Array, src: Array, partials: Array, run: Runner) -> None:
    blocks = norm_blocks(dst.shape[0])
    check_output("partials", partials, _FP64, blocks)
    run(partial(_kernel(code), dst, src, partials), blocks)


def _emit(builder: ir.IRBuilder, code: int, arrays: Any, lo: Value, hi: Value) -> None:
    """Emit the loop over blocks lo .. hi."""
    dst, src, partials = (array.data for array in arrays)
    numel, floats = arrays[0].nitems, (Float(code >> 1 & 3), Float(code >> 3 & 3))
    block = _Block(builder, Action(code & 1), *floats, dst, src)
    with cgutils.for_range_slice(builder, lo, hi, I64(1), I64) as (number, _):
        start = builder.mul(number, I64(NORM_BLOCK))
        limit = builder.add(start, I64(NORM_BLOCK))
        end = builder.select(builder.icmp_signed("<", limit, numel), limit, numel)
        builder.store(block.emit(start, end), builder.gep(partials, [number]))


_kernel = jit.kernels_of(_emit, jit.digest(__file__))


@dataclass(frozen=True, slots=True)
class _Block:
    """Emits the work on a block; `dst` and `src` are the starts of the arrays."""

    builder: ir.IRBuilder
    action: Action
    dst_float: Float
    src_float: Float
    dst: Value
    src: Value

    def emit(self, start: Value, end: Value) -> Value:
        """Emit the work on elements start .. end; the value is their sum of squares, fp64."""
        builder = self.builder
        whole = builder.sub(end, builder.urem(builder.sub(end, start), I64(SUM_LANES)))
        lanes = self._vectors(start, whole)
        sums = Lanes(builder, WIDTH)
        memory = cgutils.alloca_once(builder, ir.ArrayType(F64, SUM_LANES))
        for place, value in enumerate(lanes):
            sums.store_raw(value, memory, I64(place * WIDTH))
        self._elements(memory, whole, end)
        low, high = (sums.load_raw(F64, memory, I64(i)) for i in range(0, SUM_LANES, WIDTH))
        return sums.sum_of(sums.add(low, high))

    def _vectors(self, start: Value, end: Value) -> list[Value]:
        """Rounds of SUM_LANES elements; the lanes' sums stay in registers."""
        builder, vector = self.builder, Lanes(self.builder, WIDTH)
        places = range(SUM_LANES // WIDTH)
        totals = [cgutils.alloca_once(builder, vector.of(F64)) for _ in places]
        for total in totals:
            builder.store(vector.constant(F64, 0.0), total)
        with cgutils.for_range_slice(builder, start, end, I64(SUM_LANES), I64) as (index, _):
            indices = [builder.add(index, I64(place * WIDTH)) for place in places]
            pairs = zip(indices, totals, strict=True)
            interleave([self._step(vector, *pair) for pair in pairs])
        return [builder.load(total) for total in totals]

    def _elements(self, memory: Value, start: Value, end: Value) -> None:
        """The last fewer than SUM_LANES elements of an array, each into its lane."""
        builder, single = self.builder, Lanes(self.builder, 1)
        with cgutils.for_range_slice(builder, start, end, I64(1), I64) as (index, _):
            lane = builder.gep(memory, [I64(0), builder.sub(index, start)])
            total = builder.bitcast(lane, single.of(F64).as_pointer())
            interleave([self._step(single, index, total)])

    def _step(self, vector: Lanes, index: Value, total: Value) -> Iterator[None]:
        """One vector of elements: load, (yield), compute, store, and add the squares to *total."""
        raw = vector.load_raw(STORAGE[self.src_float], self.src, index)
        value = vector.decode(self.src_float, raw)
        if self.action is Action.ADD:
            value = vector.add(vector.load(self.dst_float, self.dst, index), value)
        yield
        same = self.action is Action.COPY and self.dst_float is self.src_float
        stored = raw if same else vector.encode(self.dst_float, value)
        vector.store_raw(stored, self.dst, index)
        wide = vector.widen(vector.decode(self.dst_float, stored))
        builder = self.builder
        builder.store(vector.fma(wide, wide, builder.load(total)), total)
