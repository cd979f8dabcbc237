"""Gradients on their way into an accumulator in device memory: the twin of `kernels.cpu.gradients`.

The same functions on tensors, with the same guarantee across the two: stored values and fp64
partials have the same bits (a NaN is a NaN), so that the norm, and with it the clipping, does not
depend on whether a gradient was summed before or after it left the device. One pass reads the
gradient, stores or adds it, and leaves per block of `NORM_BLOCK` elements the sum of squares of
what was stored; a partial that is not finite says that the block has an element that is not.

Unscaling is not done here: as on the CPU, the optimizer's pass multiplies by `grad_scale`, which
holds the clip coefficient, too, and is known only when all partials are.
"""

from typing import Any

import torch

from offload.kernels.cpu.gradients import Action
from offload.kernels.floats import norm_blocks
from offload.kernels.gpu.triton_launch import check, fits, float_of, launch, loaded, numel_of

_UNROLL = 32  # rows in flight per warp: 4 KiB of fp32


def copy_gradient(dst: torch.Tensor, src: torch.Tensor, partials: torch.Tensor) -> None:
    """dst = src, converted if the formats differ, and bit for bit if they do not.

    `dst` and `src` are (numel,) of float32, bfloat16 or float16, `partials` (blocks,) of float64.
    """
    _run(Action.COPY, dst, src, partials)


def add_gradient(dst: torch.Tensor, src: torch.Tensor, partials: torch.Tensor) -> None:
    """dst += src, into an fp32 accumulator."""
    _run(Action.ADD, dst, src, partials)


# By action and dtypes, what the kernel is compiled for: all that was found to be right.
_known: dict[tuple[Any, ...], tuple[int, ...]] = {}


def _run(action: Action, dst: torch.Tensor, src: torch.Tensor, partials: torch.Tensor) -> None:
    numel, where = dst.numel(), dst.device
    blocks = norm_blocks(numel)
    variant = (action, dst.dtype, src.dtype, partials.dtype)
    constants = _known.get(variant)
    if (
        constants is None
        or not fits(dst, numel, where)
        or not fits(src, numel, where)
        or not fits(partials, blocks, where)
    ):
        constants = _known[variant] = _checked(action, dst, src, partials)
    kernel = loaded("triton_gradient_kernel", "gradient_kernel")
    launch(kernel, blocks, (dst, src, partials), (numel,), constants, num_warps=1)


def _checked(
    action: Action, dst: torch.Tensor, src: torch.Tensor, partials: torch.Tensor
) -> tuple[int, ...]:
    """The constants to compile the kernel for. ValueError names the argument that does not fit."""
    numel = numel_of("dst", dst)
    check("dst", dst, torch.float32 if action is Action.ADD else dst.dtype, numel, dst)
    check("src", src, src.dtype, numel, dst)
    check("partials", partials, torch.float64, norm_blocks(numel), dst)
    return int(action), int(float_of("dst", dst)), int(float_of("src", src)), _UNROLL
