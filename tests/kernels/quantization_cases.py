"""Values of every kind of weights to quantize."""

import numpy as np

from offload.kernels.cpu.quantization import dequantize_weights, quantize_weights
from offload.kernels.floats import Array, Float
from offload.kernels.weight_formats import GROUP_SIZES, QuantType, WeightFormat
from tests.kernels import reference
from tests.kernels.values import SPECIAL, patterns

ALL = [(WeightFormat(each, size), kind)
       for each in QuantType for size in GROUP_SIZES for kind in Float]  # fmt: skip
# Each type, each size and each kind of value, if not all together: compiling takes the time.
SAMPLE = [
    *((WeightFormat(each), Float.BF16) for each in QuantType),
    *((WeightFormat(QuantType.INT4), kind) for kind in (Float.FP16, Float.FP32)),
    (WeightFormat(QuantType.INT4, 32), Float.BF16),
    (WeightFormat(QuantType.INT8, 128), Float.FP16),
    (WeightFormat(QuantType.NF4, 256), Float.FP32),
]
GROUPS = 40


def normal(weights: WeightFormat, groups: int = GROUPS, seed: int = 0) -> Array:
    """fp32 values as weights have them: each group of a width and a centre of its own."""
    rng = np.random.default_rng(seed)
    shape = (groups, weights.group_size)
    width = np.exp2(rng.integers(-20, 4, (groups, 1)))
    centre = rng.choice([0, 0, 0.1, 1, -30], (groups, 1))
    return ((rng.standard_normal(shape) + centre) * width).astype(np.float32).reshape(-1)


def on_grids(weights: WeightFormat, groups: int = GROUPS, seed: int = 0) -> Array:
    """Few different values per group, many of them zero: pruned, ternary, quantized by others."""
    rng = np.random.default_rng(seed)
    shape = (groups, weights.group_size)
    lowest = rng.integers(-15, 1, (groups, 1))
    steps = np.clip(rng.integers(0, 16, shape) + lowest, lowest, lowest + rng.integers(0, 16))
    step = np.exp2(rng.integers(-9, 2, (groups, 1))) * (1 + rng.random((groups, 1)))
    values = steps * step * (rng.random(shape) < rng.random((groups, 1)))
    return values.astype(np.float32).reshape(-1)


def wild(weights: WeightFormat) -> Array:
    """Groups of random bits, of special values, of one special value each, and of huge ones."""
    rng, size = np.random.default_rng(1), weights.group_size
    finite = SPECIAL[np.isfinite(SPECIAL)].repeat(size)
    chosen = [
        patterns(8 * size),
        rng.choice(SPECIAL, 8 * size),
        SPECIAL.repeat(size),
        finite * rng.random(finite.size).astype(np.float32),
        rng.uniform(-3.4e38, 3.4e38, 8 * size).astype(np.float32),
        (rng.standard_normal(8 * size) * 1e-38).astype(np.float32),
        np.tile(np.array([1, -1], np.float32), size),
        (rng.standard_normal(4 * size) * 3e4).astype(np.float32),
    ]
    return np.concatenate(chosen)


def stored(values: Array, kind: Float) -> Array:
    with np.errstate(over="ignore"):
        return reference.encode(values, kind)


def quantized(values: Array, weights: WeightFormat, kind: Float) -> tuple[Array, Array]:
    """Words and codes that the kernel makes of stored values."""
    words = np.full(values.size // weights.group_size, 77, np.uint32)
    codes = np.full(weights.codes_nbytes(values.size), 77, np.uint8)
    quantize_weights(values, words, codes, weights, kind)
    return words, codes


def dequantized(words: Array, codes: Array, weights: WeightFormat, kind: Float) -> Array:
    """What the kernel makes of codes, as the format stores it."""
    values = np.full(words.size * weights.group_size, 77, kind.storage)
    dequantize_weights(words, codes, values, weights, kind)
    return values


def any_codes(weights: WeightFormat, groups: int = GROUPS) -> tuple[Array, Array]:
    """Arbitrary words and codes, also such as `quantize_weights` never writes."""
    rng = np.random.default_rng(2)
    words = rng.integers(0, 1 << 32, groups, dtype=np.uint32)
    words[: SPECIAL.size] = SPECIAL.view(np.uint32)
    codes = rng.integers(0, 256, weights.codes_nbytes(groups * weights.group_size))
    return words, codes.astype(np.uint8)
