"""What the kernels compute, in plain NumPy: slow, to be read, and equal to them bit for bit.

The functions do one rounding per line in the order that `kernels.rules` documents. NaN payloads
are not specified. The other rules, and a whole step on stored formats, are in `reference_rules`.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.kernels.cpu.gradients import SUM_LANES
from offload.kernels.cpu.int8 import BLOCK
from offload.kernels.floats import NORM_BLOCK, Float
from offload.kernels.rules import AdamScalars

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
Bits = NDArray[Any]  # uint32
I16 = NDArray[np.int16]


@dataclass(slots=True)
class AdamState:
    """fp32 arrays (numel,); max_exp_avg_sq is there with amsgrad only."""

    weight: NDArray[Any]
    exp_avg: NDArray[Any]
    exp_avg_sq: NDArray[Any]
    max_exp_avg_sq: NDArray[Any] | None = None


def fma(a: F32 | np.float32, b: F32 | np.float32, c: F32 | np.float32) -> F32:
    """a * b + c in fp32, rounded once.

    The product is exact in fp64; the sum is not, but rounded to odd there it rounds to fp32 as the
    exact one would (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        addend = np.asarray(c, np.float64)
        total = np.asarray(product + addend)
        part = total - product
        error = (product - (total - part)) + (addend - part)
        bits = total.view(np.int64)
        nudge = np.isfinite(total) & (error != 0) & (bits % 2 == 0)
        outwards = (error > 0) == (total > 0)
        odd = np.where(nudge, np.where(outwards, bits + 1, bits - 1), bits)
        return odd.view(np.float64).astype(np.float32)


def adam_step(state: AdamState, grad: F32, scalars: AdamScalars) -> AdamState:
    """One step in fp32, operation by operation. Pure; `grad` is already widened to fp32."""
    s = scalars
    scale = np.float32(-s.grad_scale if s.maximize else s.grad_scale)
    c1, c2 = np.float32(1 - s.beta1), np.float32(1 - s.beta2)
    b2 = np.float32(s.beta2)
    inverse_root = np.float32(1 / math.sqrt(1 - s.beta2**s.step))
    minus_step_size = np.float32(-s.lr / (1 - s.beta1**s.step))
    with np.errstate(all="ignore"):
        p, m, v = state.weight, state.exp_avg, state.exp_avg_sq
        g = grad * scale
        if s.decoupled:
            p = p * np.float32(1 - s.lr * s.weight_decay)
        else:
            g = fma(np.float32(s.weight_decay), p, g)
        m = fma(c1, g, fma(-c1, m, m))
        v = fma(c2 * g, g, b2 * v)
        x = v
        if state.max_exp_avg_sq is not None:
            x = np.where(state.max_exp_avg_sq > v, state.max_exp_avg_sq, v)
        denominator = fma(np.sqrt(x), inverse_root, np.float32(s.eps))
        p = fma(minus_step_size, m / denominator, p)
    return AdamState(p, m, v, None if state.max_exp_avg_sq is None else x)


def encode(values: F32, kind: Float) -> NDArray[Any]:
    if kind is Float.FP32:
        return values.copy()
    if kind is Float.FP16:
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = _bits_or_nan(values)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def decode(stored: NDArray[Any], kind: Float) -> F32:
    if kind is Float.FP32:
        return stored.copy()
    if kind is Float.FP16:
        return stored.view(np.float16).astype(np.float32)
    return (stored.astype(np.uint32) << 16).view(np.float32)


def split_master(values: F32) -> tuple[U16, I16]:
    bits = _bits_or_nan(values)
    high = ((bits + 0x8000) >> 16).astype(np.uint16)
    return high, (bits & 0xFFFF).astype(np.uint16).view(np.int16)


def join_master(high: U16, low: I16) -> F32:
    bits = (high.astype(np.int64) << 16) + low
    return (bits & 0xFFFFFFFF).astype(np.uint32).view(np.float32)


def random_bits(key: int, first: int, numel: int) -> Bits:
    """r(key) of the elements first .. first + numel (`kernels.cpu.noise`)."""
    numbers = (first + np.arange(numel, dtype=np.uint64)).astype(np.uint32)
    x: Bits = numbers * np.uint32(0x9E3779B9) ^ np.uint32(key)
    x = (x ^ x >> 16) * np.uint32(0x7FEB352D)
    x = (x ^ x >> 15) * np.uint32(0x846CA68B)
    x ^= x >> 16
    return x


def round_bf16(values: F32, noise: Bits) -> U16:
    """fp32 values as bf16 bits, rounded stochastically with 16 random bits each."""
    return ((_bits_or_nan(values) + noise) >> 16).astype(np.uint16)


def encode_int8(values: F32, noise: Bits, *, signed: bool) -> tuple[U8, F32]:
    """The codes (numel,) and scales (blocks,) of fp32 values; `noise` are 16 random bits each."""
    blocks = [slice(start, start + BLOCK) for start in range(0, values.size, BLOCK)]
    pairs = [_encode_block(values[block], noise[block], signed) for block in blocks]
    codes = [code for code, _ in pairs]
    scales = np.array([scale for _, scale in pairs], np.float32)
    return np.concatenate([np.zeros(0, np.uint8), *codes]), scales


def _encode_block(values: F32, noise: Bits, signed: bool) -> tuple[U8, np.float32]:
    bits = values.view(np.uint32)
    magnitudes = bits & 0x7FFFFFFF
    largest = int(magnitudes.max())
    if largest >= 0x7F800000:
        return np.zeros(values.size, np.uint8), np.float32(np.nan)
    exponent = max((largest + 0x200000 >> 23) - (15 if signed else 31), 8)
    scale_bits = np.uint32(exponent << 23)
    scale = scale_bits.view(np.float32)
    with np.errstate(over="ignore"):
        total = magnitudes.view(np.float32) + scale
    code = (total.view(np.uint32) - scale_bits + (noise << 4) + 8) >> 20
    if signed:
        code = code | bits >> 31 << 7
    else:
        code = np.where(magnitudes != 0, np.maximum(code, 1), code)
    return code.astype(np.uint8), scale


def decode_int8(codes: U8, scales: F32, *, signed: bool) -> F32:
    """The fp32 values of codes (numel,) with one scale per block."""
    scale = np.repeat(scales, BLOCK)[: codes.size]
    wide = codes.astype(np.uint32)
    magnitude = wide & 0x7F if signed else wide
    with np.errstate(invalid="ignore"):
        values = ((magnitude << 20) + scale.view(np.uint32)).view(np.float32) - scale
    if not signed:
        return values
    return (values.view(np.uint32) | (wide & 0x80) << 24).view(np.float32)


def partials(values: F32) -> F64:
    """Sums of squares per NORM_BLOCK elements, in the order of `kernels.cpu.gradients`."""
    blocks = [values[start : start + NORM_BLOCK] for start in range(0, values.size, NORM_BLOCK)]
    return np.array([_sum_squares(block) for block in blocks], dtype=np.float64)


def _sum_squares(block: F32) -> np.float64:
    padded = np.zeros(-(-block.size // SUM_LANES) * SUM_LANES, dtype=np.float64)
    padded[: block.size] = block
    lanes = np.zeros(SUM_LANES, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        for row in padded.reshape(-1, SUM_LANES):
            lanes = lanes + row * row  # the product is exact, so this is an fma
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return np.float64(lanes[0])


def _bits_or_nan(values: F32) -> NDArray[np.uint32]:
    return np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))
