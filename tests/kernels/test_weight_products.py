"""Products with weights straight from their codes: the documented order of sums, bit for bit."""

import numpy as np
import pytest

from offload.kernels.cpu.weight_products import in_lane_order, multiply
from offload.kernels.floats import Array, Float, Runner
from offload.kernels.weight_formats import QuantType, WeightFormat
from tests.kernels import reference
from tests.kernels.quantization_cases import dequantized, quantized, stored

CASES = [
    (WeightFormat(QuantType.INT8), Float.BF16),
    (WeightFormat(QuantType.INT4, 32), Float.FP16),
    (WeightFormat(QuantType.INT4), Float.BF16),
    (WeightFormat(QuantType.NF4), Float.FP32),
]
ALL = pytest.mark.parametrize(("weights", "kind"), CASES, ids=str)


def matrix(weights: WeightFormat, kind: Float, columns: int, inner: int) -> tuple[Array, Array]:
    values = np.random.default_rng(0).standard_normal(columns * inner).astype(np.float32)
    return quantized(stored(values, kind), weights, kind)


def inputs(rows: int, inner: int) -> Array:
    return np.random.default_rng(1).standard_normal((rows, inner)).astype(np.float32)


def product(
    x: Array, words: Array, codes: Array, columns: int, weights: WeightFormat, kind: Float,
    *run: Runner,
) -> Array:  # fmt: skip
    out = np.full((len(x), columns), 77, np.float32)
    multiply(in_lane_order(x, weights), words, codes, out, weights, kind, *run)
    return out


def in_documented_order(x: Array, w: Array, quant_type: QuantType) -> Array:
    spans = [each.reshape(len(each), -1, 32) for each in (x, w)]
    if quant_type is QuantType.INT8:
        pairs = [(each[..., :16], each[..., 16:]) for each in spans]
    else:
        pairs = [(each[..., ::2], each[..., 1::2]) for each in spans]
    total = np.zeros((len(x), len(w), 16), np.float32)
    for span in range(spans[0].shape[1]):
        for half in range(2):
            a, b = (pair[half][:, span] for pair in pairs)
            product = np.broadcast_arrays(a[:, None], b[None])
            total = reference.fma(*product, total)
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


@ALL
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 17), (4, 8), (7, 13)])
def test_sums_are_those_of_dequantized_weights_in_the_documented_order(
    weights: WeightFormat, kind: Float, rows: int, columns: int
) -> None:
    inner = 3 * weights.group_size
    words, codes = matrix(weights, kind, columns, inner)
    w = reference.decode(dequantized(words, codes, weights, kind), kind).reshape(columns, inner)
    x = inputs(rows, inner)
    actual = product(x, words, codes, columns, weights, kind)
    np.testing.assert_array_equal(actual, in_documented_order(x, w, weights.quant_type))
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    assert np.abs(actual - exact).max() < 1e-5 * np.abs(exact).max() + 1e-5


@ALL
def test_a_sum_depends_on_its_rows_alone(
    weights: WeightFormat, kind: Float, threads: Runner
) -> None:
    inner, columns = 2 * weights.group_size, 83
    words, codes = matrix(weights, kind, columns, inner)
    x = inputs(7, inner)
    actual = product(x, words, codes, columns, weights, kind)
    np.testing.assert_array_equal(product(x, words, codes, columns, weights, kind, threads), actual)
    for rows in (slice(0, 1), slice(2, 5), slice(5, 7)):
        np.testing.assert_array_equal(
            product(x[rows], words, codes, columns, weights, kind), actual[rows]
        )


def test_a_group_that_is_not_finite_makes_its_column_nan() -> None:
    weights, kind = CASES[2]
    words, codes = matrix(weights, kind, 9, 128)
    words[5] = 0x7FC00000  # of row 2
    actual = product(inputs(3, 128), words, codes, 9, weights, kind)
    assert np.isnan(actual[:, 2]).all()
    assert np.isfinite(np.delete(actual, 2, 1)).all()


def test_a_bad_argument_is_named() -> None:
    weights, kind = CASES[2]
    words, codes = matrix(weights, kind, 8, 128)
    x, out = inputs(2, 128), np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match=r"words: expected shape \(16,\), got \(15,\)"):
        multiply(x, words[:15], codes, out, weights, kind)
    with pytest.raises(ValueError, match="x, out: expected rows of whole groups of 64"):
        multiply(x, words, codes, out[:1], weights, kind)
    with pytest.raises(ValueError, match="x, out: expected rows of whole groups of 64"):
        multiply(x[:, :96].copy(), words[:12], codes[:384], out, weights, kind)
