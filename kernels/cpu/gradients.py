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
format is to nearest even, `kernels.convert`; additions are single fp32 additions.
"""

from functools import partial

import numpy as np

from offload.kernels.cpu.gradient_loop import Action, gradient_loop
from offload.kernels.cpu.jit import Kernel
from offload.kernels.floats import (
    Array,
    Float,
    Runner,
    check_input,
    check_output,
    norm_blocks,
    numel_of,
    serial,
)

_FP32 = np.dtype(np.float32)
_FP64 = np.dtype(np.float64)


def copy_gradient(
    dst: Array, src: Array, dst_float: Float, src_float: Float, partials: Array,
    run: Runner = serial,
) -> None:  # fmt: skip
    """dst = src, converted if the formats differ, and bit for bit if they do not."""
    numel = numel_of("dst", dst)
    check_output("dst", dst, dst_float.storage, numel)
    check_input("src", src, src_float.storage, numel)
    _run(gradient_loop(Action.COPY, dst_float, src_float), dst, src, partials, run)


def add_gradient(
    dst: Array, src: Array, src_float: Float, partials: Array, run: Runner = serial
) -> None:
    """dst += src, into an fp32 accumulator."""
    numel = numel_of("dst", dst)
    check_output("dst", dst, _FP32, numel)
    check_input("src", src, src_float.storage, numel)
    _run(gradient_loop(Action.ADD, Float.FP32, src_float), dst, src, partials, run)


def _run(loop: Kernel, dst: Array, src: Array, partials: Array, run: Runner) -> None:
    blocks = norm_blocks(dst.shape[0])
    check_output("partials", partials, _FP64, blocks)
    run(partial(loop, dst, src, partials), blocks)
