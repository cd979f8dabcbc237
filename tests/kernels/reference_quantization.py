"""Quantized weights as `kernels.cpu.quantization` defines them, in plain NumPy."""

import numpy as np

from offload.kernels.floats import Array, Float
from offload.kernels.weight_formats import QuantType, WeightFormat
from tests.kernels import reference

LEVELS = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
LARGEST = {
    Float.FP32: np.float32(np.finfo(np.float32).max),
    Float.BF16: np.array([0x7F7F0000], np.uint32).view(np.float32)[0],
    Float.FP16: np.float32(65504),
}
MIN_SCALE = np.float32(2.0**-100)


def quantize(stored: Array, weights: WeightFormat, kind: Float) -> tuple[Array, Array]:
    """Words and codes (bytes) of values of any format."""
    with np.errstate(all="ignore"):
        return _quantize(stored, weights, kind)


def _quantize(stored: Array, weights: WeightFormat, kind: Float) -> tuple[Array, Array]:
    x = reference.decode(stored, kind).reshape(-1, weights.group_size)
    finite = np.isfinite(x).all(1, keepdims=True)
    x = np.where(finite, x, np.float32(0))
    zero = np.float32(0)
    up, down = (np.maximum(each, zero).max(1, keepdims=True) for each in (x, -x))
    z = np.zeros(len(x), np.uint32)[:, None]
    if weights.quant_type is QuantType.INT8:
        s = np.maximum(_masked((np.maximum(up, down) / np.float32(127)), 7), MIN_SCALE)
        codes = np.rint(x / s).astype(np.int8).view(np.uint8)
    elif weights.quant_type is QuantType.INT4:
        s = _int4_scale(up, down)
        z = np.minimum(np.rint(down / s), 15).astype(np.uint32)
        codes = np.clip(np.rint(x / s) + z, 0, 15).astype(np.uint8)
    else:
        s = np.maximum(np.maximum(up, down), MIN_SCALE)
        midpoints = (LEVELS[1:] + LEVELS[:-1]) / np.float32(2)
        codes = ((x / s)[..., None] > midpoints).sum(-1).astype(np.uint8)
    words = np.where(finite, s.view(np.uint32) | z, np.uint32(0x7FC00000))
    return words.reshape(-1).astype(np.uint32), _packed(codes.reshape(-1), weights.quant_type)


def _int4_scale(up: Array, down: Array) -> Array:
    r = (up / np.float32(16) + down / np.float32(16)) * np.float32(16 / 15)
    rounded = (r.view(np.uint32) + np.uint32(1 << 16)).view(np.float32)
    s = np.maximum(_masked(rounded, 17), MIN_SCALE)
    lower = (s.view(np.uint32) - np.uint32(1 << 17)).view(np.float32)
    short = np.rint(up / s) + np.rint(down / s) < 15
    return np.asarray(np.where(short, np.maximum(lower, MIN_SCALE), s))


def _masked(x: Array, low_bits: int) -> Array:
    return (x.view(np.uint32) & ~np.uint32((1 << low_bits) - 1)).view(np.float32)


def _packed(codes: Array, quant_type: QuantType) -> Array:
    if quant_type is QuantType.INT8:
        return codes
    first, second = codes[::2], codes[1::2]
    return np.asarray(first | second << 4 if quant_type is QuantType.INT4 else first << 4 | second)


def dequantize(words: Array, codes: Array, weights: WeightFormat, kind: Float) -> Array:
    """Values in a format (16-bit ones as bits)."""
    word = words.repeat(weights.group_size)
    with np.errstate(all="ignore"):
        if weights.quant_type is QuantType.INT8:
            return reference.encode(
                codes.view(np.int8).astype(np.float32) * word.view(np.float32), kind
            )
        low, high = codes & 15, codes >> 4
        pair = (low, high) if weights.quant_type is QuantType.INT4 else (high, low)
        q = np.stack(pair, 1).reshape(-1)
        if weights.quant_type is QuantType.NF4:
            return reference.encode(LEVELS[q] * word.view(np.float32), kind)
        z = (word & 15).astype(np.float32)
        value = (q.astype(np.float32) - z) * (word & ~np.uint32(15)).view(np.float32)
        limit = LARGEST[kind]
        return reference.encode(np.clip(value, -limit, limit), kind)
