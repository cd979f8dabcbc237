"""Optimizer states between their stored format and fp32, whole arrays at a time.

For reading and writing states from outside a step (state dicts, checkpoints of mixed formats): in
NumPy, not on the way of a step. What `decode_state` gave, `encode_state` stores so that it decodes
to the same values again; any other values are rounded to nearest.
"""

import numpy as np

from offload.kernels.cpu.convert import decode, encode
from offload.kernels.cpu.int8 import BLOCK, MIN_SCALE_EXPONENT, octaves
from offload.kernels.floats import Array, Float
from offload.kernels.rules import StateFormat

_CODE_SHIFT = 20  # a code counts steps of 2**20 in fp32 bits
_HALF = np.uint32(1 << (_CODE_SHIFT - 1))
_NAN_BITS = np.uint32(0x7FC00000)
_INF_BITS = np.uint32(0x7F800000)
_CARRY = np.uint32(0x200000)  # from 1.75 on, the next exponent


def decode_state(stored: Array, scales: Array | None, kind: StateFormat, *, signed: bool) -> Array:
    """fp32 values (numel,), new memory, of a state as it is kept: fp32, uint16 bits of bf16, or
    uint8 codes with a scale per block."""
    if kind is StateFormat.FP32:
        return np.array(stored, dtype=np.float32)
    if kind is StateFormat.BF16:
        out = np.empty(stored.shape, dtype=np.float32)
        decode(np.ascontiguousarray(stored), out, Float.BF16)
        return out
    assert scales is not None, "8-bit states have scales"
    return decode_int8(stored, scales, signed=signed)


def decode_int8(codes: Array, scales: Array, *, signed: bool) -> Array:
    """The fp32 values of codes (numel,) with one scale per block (`kernels.cpu.int8`)."""
    scale = np.repeat(scales, BLOCK)[: codes.size]
    wide = codes.astype(np.uint32)
    magnitude = wide & 0x7F if signed else wide
    with np.errstate(invalid="ignore"):
        values = ((magnitude << _CODE_SHIFT) + scale.view(np.uint32)).view(np.float32) - scale
    if not signed:
        return values
    return (values.view(np.uint32) | (wide & 0x80) << 24).view(np.float32)


def encode_state(
    values: Array, stored: Array, scales: Array | None, kind: StateFormat, *, signed: bool
) -> None:
    """Store fp32 `values` (numel,), which start at a block boundary."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if kind is StateFormat.FP32:
        stored[:] = values
    elif kind is StateFormat.BF16:
        encode(values, stored, Float.BF16)
    else:
        assert scales is not None, "8-bit states have scales"
        for number in range(len(scales)):
            span = slice(number * BLOCK, min((number + 1) * BLOCK, len(values)))
            stored[span], scales[number] = _best_code(values[span], signed)


def _best_code(block: Array, signed: bool) -> tuple[Array, np.float32]:
    """Codes and scale of one block.

    The largest value that a code gave may have been rounded across the threshold that chose its
    scale; the scale that gives all values back is one of the neighbours then.
    """
    magnitudes = block.view(np.uint32) & np.uint32(0x7FFFFFFF)
    largest = magnitudes.max()
    if largest >= _INF_BITS:
        return np.zeros(len(block), np.uint8), _NAN_BITS.view(np.float32)
    usual = int((largest + _CARRY) >> np.uint32(23)) - octaves(signed)
    best = None
    for exponent in (usual, usual - 1, usual + 1):
        scale = np.uint32(max(exponent, MIN_SCALE_EXPONENT) << 23).view(np.float32)
        codes = _coded(block, scale, signed)
        decoded = decode_int8(codes, np.array([scale]), signed=signed)
        if np.array_equal(decoded.view(np.uint32), block.view(np.uint32)):
            return codes, scale
        best = best or (codes, scale)
    assert best is not None, "three were tried"
    return best


def _coded(block: Array, scale: np.float32, signed: bool) -> Array:
    magnitude = np.abs(block)
    moved = (magnitude + scale).astype(np.float32).view(np.uint32) - scale.view(np.uint32)
    max_code = np.uint32(127 if signed else 255)
    codes = np.minimum((moved + _HALF) >> np.uint32(_CODE_SHIFT), max_code)
    if signed:
        sign = (block.view(np.uint32) >> np.uint32(24)) & np.uint32(0x80)
        return (codes | sign).astype(np.uint8)
    return np.where(magnitude > 0, np.maximum(codes, 1), 0).astype(np.uint8)
