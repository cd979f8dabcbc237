# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, RET505, SIM108 - what is fixed at compile time is written so in Triton
"""Formats of optimizer states as Triton functions, with the bits of `kernels.cpu.noise` and `int8`.

Blocks of the 8-bit code are the rows of a tile: offsets are (rows, 256) and scales (rows, 1). The
other formats do not care what shape their offsets have.
"""

import triton
import triton.language as tl

from offload.kernels.cpu import int8, noise
from offload.kernels.gpu.triton_ops import (
    bits_of,
    bits_or_nan,
    from_bits,
    high_half,
    load,
    store,
    widen_bits,
)
from offload.kernels.rules import StateFormat

FP32_STATES = tl.constexpr(int(StateFormat.FP32))
BF16_STATES = tl.constexpr(int(StateFormat.BF16))
INT8_STATES = tl.constexpr(int(StateFormat.INT8))
CODE_BLOCK = tl.constexpr(int8.BLOCK)
GOLDEN = tl.constexpr(noise.GOLDEN)


@triton.jit
def random_bits(numbers, key):
    """32 random bits for elements of these numbers (uint32) in their group's flat buffer."""
    x = (numbers * GOLDEN) ^ key
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def round_bf16(value, draw):
    """fp32 -> bf16 as int16, up or down by 16 random bits."""
    return high_half(bits_or_nan(value) + draw)


@triton.jit
def block_scale(value, SIGNED: tl.constexpr):
    """(rows, 256) fp32 -> (rows, 1): the scale of each row's codes, a power of two, or NaN."""
    magnitude = (bits_of(value) & 0x7FFFFFFF).to(tl.int32)
    largest = tl.expand_dims(tl.max(magnitude, axis=1), 1)
    exponent = (largest + 0x200000) >> 23
    if SIGNED:
        exponent = tl.maximum(exponent - 15, 8)
    else:
        exponent = tl.maximum(exponent - 31, 8)
    bits = tl.where(largest >= 0x7F800000, 0x7FC00000, exponent << 23)
    return from_bits(bits.to(tl.uint32, bitcast=True))


@triton.jit
def encode_int8(value, scale, draw, SIGNED: tl.constexpr):
    """fp32 and the scale of its block -> uint8, up or down by 16 random bits."""
    distance = bits_of(tl.abs(value) + scale) - bits_of(scale)
    code = (distance + (draw << 4) + 8) >> 20
    if SIGNED:
        code = code | ((bits_of(value) >> 31) << 7)
    else:
        code = tl.where((code == 0) & (value != 0.0), 1, code)
    return tl.where(scale != scale, 0, code).to(tl.uint8)


@triton.jit
def decode_int8(code, scale, SIGNED: tl.constexpr):
    """uint8 and the scale of its block -> fp32 (exact)."""
    code = code.to(tl.uint32)
    if SIGNED:
        value = from_bits(bits_of(scale) + ((code & 0x7F) << 20)) - scale
        # By bits: Triton before 3.7 compiles -x to 0 - x, which loses the sign of a zero.
        return from_bits(bits_of(value) | ((code & 0x80) << 24))
    else:
        return from_bits(bits_of(scale) + (code << 20)) - scale


@triton.jit
def load_state(
    pointer, scales, offsets, blocks, numel,
    FORMAT: tl.constexpr, SIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """fp32 values of a state, 0 beyond numel."""
    raw = load(pointer, offsets, numel, WHOLE)
    if FORMAT == INT8_STATES:
        scale = load(scales, blocks, tl.cdiv(numel, CODE_BLOCK), WHOLE)
        return decode_int8(raw, scale, SIGNED)
    elif FORMAT == BF16_STATES:
        return from_bits(widen_bits(raw) << 16)
    else:
        return raw


@triton.jit
def store_state(
    pointer, scales, offsets, blocks, value, draw, numel,
    FORMAT: tl.constexpr, SIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Store fp32 values of a state; `draw` holds 16 random bits for each."""
    if FORMAT == INT8_STATES:
        # Beyond numel everything was loaded as 0 and no rule made anything else of it, so it has
        # no say in the scale of a short block.
        scale = block_scale(value, SIGNED)
        store(pointer, offsets, encode_int8(value, scale, draw, SIGNED), numel, WHOLE)
        store(scales, blocks, scale, tl.cdiv(numel, CODE_BLOCK), WHOLE)
    elif FORMAT == BF16_STATES:
        store(pointer, offsets, round_bf16(value, draw), numel, WHOLE)
    else:
        store(pointer, offsets, value, numel, WHOLE)
