"""Conversions between fp32 and 16-bit floats, and between an fp32 master and its two halves.

A split master stores fp32 bits u in a bf16 weight and a signed remainder:

    high = (u + 0x8000) >> 16        the value rounded to bf16, half up (away from zero)
    low  = int16(u & 0xffff)         what is left, from -0x8000 to 0x7fff
    u    = (high << 16) + low        for every u: lossless

Near the end of the range: an infinity is split as itself with a remainder of 0. A finite master at
or above the midpoint between the largest bf16 and infinity (|x| >= 3.3961775e38) reads as infinity
in `high`, as it would in any rounding to nearest, but joins to the same finite value. A NaN becomes
the quiet NaN 0x7fc00000 (high 0x7fc0, low 0): rounding up another one could carry into the sign and
read as zero, or leave an infinity. So `high` is a NaN exactly where the master is.

Without a split bf16 is rounded to nearest even with NaN written as 0x7fc0, and fp16 is rounded to
nearest even by the CPU's own conversion, which quiets a NaN and keeps the top of its payload.
Beyond the largest finite value both give infinity. Decoding is exact.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np
from llvmlite import ir

from offload.kernels.cpu import jit
from offload.kernels.cpu.lanes import Lanes, Value, sweep
from offload.kernels.floats import Array, Float, check_input, check_output, numel_of

_FP32 = np.dtype(np.float32)
_UINT16 = np.dtype(np.uint16)
_INT16 = np.dtype(np.int16)
_BURST = 64


class _Conversion(IntEnum):
    ENCODE = 0
    DECODE = 1
    SPLIT = 2
    JOIN = 3


def encode(src: Array, dst: Array, dst_float: Float) -> None:
    """Round fp32 `src` to `dst_float` in `dst`; both (numel,), not overlapping."""
    numel = numel_of("src", src)
    check_input("src", src, _FP32, numel)
    check_output("dst", dst, dst_float.storage, numel)
    _kernel(_Conversion.ENCODE << 2 | dst_float)(src, dst, dst, 0, numel)


def decode(src: Array, dst: Array, src_float: Float) -> None:
    """Widen `src` of format `src_float` to fp32 `dst`; both (numel,), not overlapping."""
    numel = numel_of("src", src)
    check_input("src", src, src_float.storage, numel)
    check_output("dst", dst, _FP32, numel)
    _kernel(_Conversion.DECODE << 2 | src_float)(src, dst, dst, 0, numel)


def split_master(fp32: Array, high: Array, low: Array) -> None:
    """Split `fp32` into `high` (bf16 as uint16 bits) and `low` (int16); all (numel,)."""
    numel = numel_of("fp32", fp32)
    check_input("fp32", fp32, _FP32, numel)
    check_output("high", high, _UINT16, numel)
    check_output("low", low, _INT16, numel)
    _kernel(_Conversion.SPLIT << 2)(fp32, high, low, 0, numel)


def join_master(high: Array, low: Array, out: Array) -> None:
    """Write to fp32 `out` the master whose halves are `high` (uint16) and `low` (int16)."""
    numel = numel_of("high", high)
    check_input("high", high, _UINT16, numel)
    check_input("low", low, _INT16, numel)
    check_output("out", out, _FP32, numel)
    _kernel(_Conversion.JOIN << 2)(high, low, out, 0, numel)


def _emit(builder: ir.IRBuilder, code: int, arrays: Any, lo: Value, hi: Value) -> None:
    """Emit the loop over elements lo .. hi, of arrays in the order of the public function."""
    conversion, kind = _Conversion(code >> 2), Float(code & 3)
    a, b, c = (array.data for array in arrays)

    def step(vector: Lanes, index: Value) -> Iterator[None]:
        if conversion is _Conversion.ENCODE:
            vector.store(kind, vector.load(Float.FP32, a, index), b, index)
        elif conversion is _Conversion.DECODE:
            vector.store(Float.FP32, vector.load(kind, a, index), b, index)
        elif conversion is _Conversion.SPLIT:
            vector.store_split(vector.load(Float.FP32, a, index), b, c, index)
        else:
            vector.store_raw(vector.load_split(a, b, index), c, index)
        yield

    sweep(builder, lo, hi, _BURST, step)


_kernel = jit.kernels_of(_emit, jit.digest(__file__))
