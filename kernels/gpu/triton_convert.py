"""Conversions of parameters and optimizer states in device memory, on their way in or out.

Twins, bit for bit (a NaN is a NaN), of `kernels.convert` (16-bit floats to nearest even, split
masters) and of the encodings in `kernels.noise` and `kernels.int8`: what is encoded on a GPU before
it travels decodes on the CPU as if it had been encoded there, and the other way round.
"""

from enum import Enum
from functools import cache

import torch

from offload.kernels.cpu.int8 import BLOCK as CODE_BLOCK
from offload.kernels.cpu.noise import Noise
from offload.kernels.floats import Float
from offload.kernels.gpu.triton_launch import Kernel, check, float_of, launch, loaded, numel_of
from offload.kernels.rules import StateFormat

_BLOCK = 1024
_WARPS = 8
_ENCODE, _DECODE, _SPLIT, _JOIN, _ENCODE_STATE, _DECODE_STATE = range(6)
_NO_NOISE = Noise(0, 0)


class Draw(Enum):
    """The purpose of the random bits that round an array, see `kernels.noise`."""

    STATE_0 = "the first state of a rule"
    STATE_1 = "its second state"
    WEIGHT = "a weight without a master"


def encode(src: torch.Tensor, dst: torch.Tensor) -> None:
    """Round float32 `src` to the dtype of `dst`, to nearest even; both (numel,)."""
    numel = numel_of("src", src)
    check("src", src, torch.float32, numel, src)
    check("dst", dst, dst.dtype, numel, src)
    _run(_ENCODE, src, dst, dst, numel, float_of("dst", dst))


def decode(src: torch.Tensor, dst: torch.Tensor) -> None:
    """Widen `src` to float32 `dst`; both (numel,)."""
    numel = numel_of("src", src)
    check("src", src, src.dtype, numel, src)
    check("dst", dst, torch.float32, numel, src)
    _run(_DECODE, src, dst, dst, numel, float_of("src", src))


def split_master(fp32: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Split float32 `fp32` into bfloat16 `high` and int16 `low`; all (numel,)."""
    numel = numel_of("fp32", fp32)
    check("fp32", fp32, torch.float32, numel, fp32)
    check("high", high, torch.bfloat16, numel, fp32)
    check("low", low, torch.int16, numel, fp32)
    _run(_SPLIT, fp32, high, low, numel, Float.BF16)


def join_master(high: torch.Tensor, low: torch.Tensor, out: torch.Tensor) -> None:
    """Write to float32 `out` the master whose halves are bfloat16 `high` and int16 `low`."""
    numel = numel_of("high", high)
    check("high", high, torch.bfloat16, numel, high)
    check("low", low, torch.int16, numel, high)
    check("out", out, torch.float32, numel, high)
    _run(_JOIN, high, low, out, numel, Float.BF16)


def round_bf16(src: torch.Tensor, dst: torch.Tensor, noise: Noise, draw: Draw) -> None:
    """Round float32 `src` to bfloat16 `dst` stochastically; both (numel,)."""
    numel = numel_of("src", src)
    check("src", src, torch.float32, numel, src)
    check("dst", dst, torch.bfloat16, numel, src)
    _run(_ENCODE_STATE, src, dst, dst, numel, StateFormat.BF16, noise=noise, draw=draw)


def encode_int8(
    src: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    noise: Noise,
    draw: Draw,
    *,
    signed: bool,
) -> None:
    """Encode float32 `src` (numel,) in uint8 `codes` and float32 `scales` (ceil(numel / 256),).

    Without `signed`, `src` is nowhere negative.
    """
    numel = numel_of("src", src)
    check("src", src, torch.float32, numel, src)
    check("codes", codes, torch.uint8, numel, src)
    check("scales", scales, torch.float32, -(-numel // CODE_BLOCK), src)
    _run(
        _ENCODE_STATE, src, codes, scales, numel, StateFormat.INT8,
        signed=signed, noise=noise, draw=draw,
    )  # fmt: skip


def decode_int8(
    codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, *, signed: bool
) -> None:
    """Write to float32 `out` the values that `encode_int8` encoded."""
    numel = numel_of("codes", codes)
    check("codes", codes, torch.uint8, numel, codes)
    check("scales", scales, torch.float32, -(-numel // CODE_BLOCK), codes)
    check("out", out, torch.float32, numel, codes)
    _run(_DECODE_STATE, codes, scales, out, numel, StateFormat.INT8, signed=signed)


def _run(
    action: int,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    numel: int,
    kind: Float | StateFormat,
    *,
    signed: bool = True,
    noise: Noise = _NO_NOISE,
    draw: Draw = Draw.STATE_0,
) -> None:
    launch(
        _kernel(),
        -(-numel // _BLOCK),
        (a, b, c),
        (
            numel,
            noise.weight_key if draw is Draw.WEIGHT else noise.key,
            noise.first & 0xFFFFFFFF,
        ),
        (action, int(kind), signed, draw is not Draw.STATE_1, _BLOCK),
        _WARPS,
    )


@cache
def _kernel() -> Kernel:
    def convert_kernel() -> Kernel:
        from offload.kernels.gpu.triton_convert_kernel import convert_kernel

        return convert_kernel

    return loaded(convert_kernel)
