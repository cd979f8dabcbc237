"""Stochastic rounding: reproducible bits, results right on average."""

import numpy as np
import pytest

from offload.kernels.cpu.noise import Noise, mix64, noise_of
from offload.kernels.cpu.optimizer import optimizer_step
from offload.kernels.floats import Float
from offload.kernels.rules import SgdScalars, StateFormat
from tests.kernels import reference

NUMEL = 1 << 18


def test_the_generator_is_the_documented_one() -> None:
    """In plain integers; a change would make resumed runs differ from uninterrupted ones."""
    key, first = 0xDEADBEEF, 0xFFFFFFFE
    for place, got in enumerate(reference.random_bits(key, first, 5)):
        x = ((first + place) % 2**32 * 0x9E3779B9) % 2**32 ^ key
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        assert int(got) == x ^ x >> 16


def test_keys_are_pinned() -> None:
    assert mix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # SplitMix64's first number from 0
    assert noise_of(0, 0, 0) == Noise(0x238275BC, 0x38FCBE91)
    assert noise_of(1, 2, 3) == Noise(0xD0734750, 0xFDE362B3)


def rounded_weights(value: float, noise: Noise) -> np.ndarray:
    """A weight of `value` rounded to bf16 NUMEL times, by a step that changes nothing."""
    weight = np.zeros(NUMEL, np.uint16)
    grad = np.full(NUMEL, -value, np.float32)
    scalars = SgdScalars(1.0, 0.0, 0.0, step=1)  # 0 - 1 * -value
    optimizer_step(
        grad, weight, [], scalars, grad_float=Float.FP32, weight_float=Float.BF16, noise=noise
    )
    return reference.decode(weight, Float.BF16)


def assert_unbiased(values: np.ndarray, exact: float) -> None:
    """The mean is within 5 standard errors; there are two values only, and the right ones."""
    levels = np.unique(values)
    assert levels.size == 2
    low, high = (float(level) for level in levels)
    assert low < exact < high
    share = (exact - low) / (high - low)
    got = float(np.mean(values == high))
    assert abs(got - share) < 5 * np.sqrt(share * (1 - share) / values.size)


@pytest.mark.parametrize("value", [1.001, -3.33e-5, 0.7071, 1e30])
@pytest.mark.parametrize("step", [1, 2])
def test_a_weight_is_right_on_average(value: float, step: int) -> None:
    assert_unbiased(rounded_weights(value, noise_of(5, 0, step)), float(np.float32(value)))


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFC00000])
def test_any_nan_stays_a_nan(bits: int) -> None:
    grad = np.full(64, bits, np.uint32).view(np.float32)
    weight, momentum = np.zeros(64, np.uint16), np.zeros(64, np.uint16)
    optimizer_step(
        grad, weight, [momentum], SgdScalars(1.0, 0.5, 0.0, 1), grad_float=Float.FP32,
        weight_float=Float.BF16, state_format=StateFormat.BF16, noise=Noise(1, 2),
    )  # fmt: skip
    assert weight.tolist() == momentum.tolist() == [0x7FC0] * 64
