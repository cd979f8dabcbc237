"""Weights in 8 and 4 bits: the definition's bits, what is kept, and how far off the rest is."""

import llvmlite.binding as llvm
import numpy as np
import pytest

from offload.kernels.cpu import quantization
from offload.kernels.cpu.quantization import dequantize_weights, quantize_weights
from offload.kernels.floats import Array, Float, Runner
from offload.kernels.weight_formats import QuantType, WeightFormat
from tests.kernels import reference, reference_quantization
from tests.kernels.quantization_cases import (
    SAMPLE,
    any_codes,
    dequantized,
    normal,
    on_grids,
    quantized,
    stored,
    wild,
)
from tests.kernels.test_generated_code import count, fresh, x86_only
from tests.kernels.values import assert_same


def fp32(values: Array, kind: Float) -> Array:
    return np.asarray(reference.decode(values, kind))


def through(values: Array, weights: WeightFormat, kind: Float) -> Array:
    """fp32 of what is stored of `values`."""
    return fp32(dequantized(*quantized(stored(values, kind), weights, kind), weights, kind), kind)


def test_quantizing_matches_reference(weights: WeightFormat, kind: Float) -> None:
    for values in (normal(weights), on_grids(weights), wild(weights)):
        given = stored(values, kind)
        words, codes = quantized(given, weights, kind)
        expected_words, expected_codes = reference_quantization.quantize(given, weights, kind)
        np.testing.assert_array_equal(words, expected_words)
        np.testing.assert_array_equal(codes, expected_codes)


def test_dequantizing_anything_matches_reference(weights: WeightFormat, kind: Float) -> None:
    words, codes = any_codes(weights)
    expected = reference_quantization.dequantize(words, codes, weights, kind)
    assert_same(fp32(dequantized(words, codes, weights, kind), kind), fp32(expected, kind))


def test_threads_change_no_bit(weights: WeightFormat, kind: Float, threads: Runner) -> None:
    given = stored(normal(weights), kind)
    words, codes = quantized(given, weights, kind)
    again = np.zeros_like(words), np.zeros_like(codes)
    quantize_weights(given, *again, weights, kind, threads)
    np.testing.assert_array_equal(again[0], words)
    np.testing.assert_array_equal(again[1], codes)
    values = np.zeros_like(given)
    dequantize_weights(words, codes, values, weights, kind, threads)
    np.testing.assert_array_equal(values, dequantized(words, codes, weights, kind))


def test_dequantized_values_are_kept(weights: WeightFormat, kind: Float) -> None:
    for seed in range(8):
        for values in (normal(weights, 200, seed), on_grids(weights, 200, seed)):
            if kind is Float.FP16:
                values = values[_is_normal(values, weights)]
            first = dequantized(*quantized(stored(values, kind), weights, kind), weights, kind)
            again = dequantized(*quantized(first, weights, kind), weights, kind)
            np.testing.assert_array_equal(again, first)


def _is_normal(values: Array, weights: WeightFormat) -> Array:
    """Whether each value's group has a step that fp16 can tell from the next one."""
    width = np.ptp(values.reshape(-1, weights.group_size), axis=1) / 15
    return np.repeat(width > 2.0**-14, weights.group_size)


@pytest.mark.parametrize(
    "weights_fp32", [weights for weights, kind in SAMPLE if kind is Float.FP32]
)
def test_no_value_is_further_off_than_its_group_allows(weights_fp32: WeightFormat) -> None:
    weights = weights_fp32
    values = normal(weights, 400)
    actual = through(values, weights, Float.FP32).reshape(-1, weights.group_size)
    rows = values.reshape(-1, weights.group_size)
    off = np.abs(actual - rows)
    up, down = np.maximum(rows, 0).max(1), np.maximum(-rows, 0).max(1)
    largest = np.maximum(up, down)
    if weights.quant_type is QuantType.INT8:
        assert (off.max(1) <= largest / 127 / 2 * 1.0001).all()
    elif weights.quant_type is QuantType.NF4:
        assert (off.max(1) <= largest * 0.1520).all()
    else:
        step = (up + down) / 15
        ends = (rows == up[:, None]) | (-rows == down[:, None])
        assert (off.max(1) <= step * 1.02).all()
        inside = (rows < up[:, None] - step[:, None]) & (-rows < down[:, None] - step[:, None])
        assert (np.where(inside, off, 0).max(1) <= step / 2 * 1.01).all()
        assert ends.any()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_group_with_a_value_that_is_not_finite_reads_as_nan(
    weights: WeightFormat, kind: Float, bad: float
) -> None:
    values = np.random.default_rng(0).standard_normal((3, weights.group_size)).astype(np.float32)
    values[1, 7] = bad
    words, codes = quantized(stored(values.reshape(-1), kind), weights, kind)
    assert words[1] == 0x7FC00000
    actual = fp32(dequantized(words, codes, weights, kind), kind).reshape(values.shape)
    assert np.isnan(actual[1]).all()
    assert np.isfinite(actual[::2]).all()


def test_the_largest_finite_numbers_stay_finite(weights: WeightFormat, kind: Float) -> None:
    largest = reference_quantization.LARGEST[kind]
    for low, high in [(-1, 1), (0, 1), (-1, 0), (-0.3, 1), (-1, 0.77)]:
        values = np.linspace(low, high, weights.group_size).astype(np.float32) * largest
        actual = through(values, weights, kind)
        assert np.isfinite(actual).all()
        assert np.abs(actual).max() > 0.9 * largest


def test_a_bad_argument_is_named() -> None:
    with pytest.raises(ValueError, match="group_size: expected one of 32, 64, 128, 256, got 48"):
        WeightFormat(QuantType.INT4, 48)
    weights = WeightFormat(QuantType.INT4)
    words, codes = np.zeros(2, np.uint32), np.zeros(64, np.uint8)
    values = np.zeros(128, np.float32)
    with pytest.raises(ValueError, match="values: 100 elements are no whole groups of 64"):
        quantize_weights(values[:100], words, codes, weights, Float.FP32)
    with pytest.raises(ValueError, match=r"codes: expected shape \(64,\), got \(63,\)"):
        quantize_weights(values, words, codes[:63], weights, Float.FP32)
    with pytest.raises(ValueError, match=r"words: expected shape \(2,\), got \(1,\)"):
        dequantize_weights(words[:1], codes, values, weights, Float.FP32)
    with pytest.raises(ValueError, match="values: expected dtype uint16, got float32"):
        dequantize_weights(words, codes, values, weights, Float.BF16)


@x86_only
@pytest.mark.parametrize("feature", ["avx2", "none"])
@pytest.mark.parametrize("quant_type", [QuantType.INT4, QuantType.NF4])
def test_cpus_with_other_instructions_get_the_same_bits(
    quant_type: QuantType, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not llvm.get_host_cpu_features().get("avx2"):
        pytest.skip("this CPU has none of them")
    weights, kind = WeightFormat(quant_type), Float.BF16
    words, codes = any_codes(weights)
    values = np.zeros(words.size * weights.group_size, kind.storage)
    kernel = fresh(quantization.kernel(quantization.Action.DEQUANTIZE, weights, kind))
    with monkeypatch.context() as patched:
        patched.setattr(quantization, "has_wide_registers", lambda: False)
        patched.setattr(llvm, "get_host_cpu_features", lambda: {"avx2": feature == "avx2"})
        kernel(values, words, codes, 0, words.size)
    expected = dequantized(words, codes, weights, kind)
    assert_same(fp32(values, kind), fp32(expected, kind))
    (text,) = kernel.inspect_asm().values()  # type: ignore[attr-defined]
    permuted = count(r"vpermp?[sd]\s.*ymm", text)
    assert permuted >= 8 if feature == "avx2" else permuted == 0
