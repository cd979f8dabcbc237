"""8-bit states: what the code promises, and that optimizers get somewhere with it."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from offload.kernels.cpu.int8 import BLOCK
from offload.kernels.cpu.noise import noise_of
from offload.kernels.cpu.optimizer import optimizer_step, scale_blocks
from offload.kernels.floats import Float
from offload.kernels.rules import AdagradScalars, AdamScalars, LionScalars, Scalars, StateFormat
from tests.kernels import reference
from tests.kernels.step_cases import Formats, Stored

F32 = NDArray[np.float32]
LION = LionScalars(0.0, 0.0, 0.0, 0.0)  # the momentum becomes the gradient
ADAGRAD = AdagradScalars(0.0, 1.0, 0.0, step=1)  # the sum becomes the gradient's square
FP32 = {"grad_float": Float.FP32, "weight_float": Float.FP32}


class Block:
    """A state as the kernel keeps it, beside the values that it was given."""

    def __init__(self, grad: F32, *, signed: bool, step: int = 1) -> None:
        numel = grad.size
        self.signed = signed
        self.codes = np.zeros(numel, np.uint8)
        self.scales = np.zeros(scale_blocks(numel), np.float32)
        optimizer_step(
            grad, np.zeros(numel, np.float32), [self.codes], LION if signed else ADAGRAD,
            state_format=StateFormat.INT8, scales=[self.scales], noise=noise_of(0, 0, step), **FP32,
        )  # fmt: skip
        with np.errstate(all="ignore"):
            self.exact = grad if signed else grad * grad

    @property
    def values(self) -> F32:
        return reference.decode_int8(self.codes, self.scales, signed=self.signed)


def wide_ranged(numel: int, seed: int = 0) -> F32:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(numel) * 2.0 ** rng.normal(0, 4, numel)).astype(np.float32)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("numel", [1, 17, 256, 1000, 100_000])
def test_the_error_is_below_one_step(numel: int, signed: bool) -> None:
    block = Block(wide_ranged(numel), signed=signed)
    scale = np.repeat(block.scales, BLOCK)[:numel].astype(np.float64)
    exact = block.exact.astype(np.float64)
    bound = (np.abs(exact) + scale) / 8
    assert np.all(np.abs(block.values - exact) < bound)
    # The scale leaves room for 15 or 31 octaves below the largest value.
    largest = np.maximum.reduceat(np.abs(exact), range(0, numel, BLOCK))
    ratio = np.log2(largest / block.scales)
    octaves = 15 if signed else 31
    assert np.all((ratio >= octaves - 0.2) & (ratio < octaves + 0.81))


def test_a_second_moment_above_zero_never_reads_as_zero() -> None:
    grad = np.full(BLOCK, 1e-18, np.float32)
    grad[0] = 1e10
    for step in range(20):
        block = Block(grad, signed=False, step=step)
        assert np.all(block.values > 0)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [BLOCK, BLOCK + 255, 2 * BLOCK + 5])
def test_a_block_that_is_not_finite_reads_as_nan_for_good(
    place: int, bad: float, signed: bool
) -> None:
    values = wide_ranged(2 * BLOCK + 9)
    values[place] = bad
    block = Block(values, signed=signed)
    number = place // BLOCK
    hit = np.arange(values.size) // BLOCK == number
    assert np.isnan(block.values[hit]).all()
    assert np.isfinite(block.values[~hit]).all()
    assert np.all(block.codes[hit] == 0)
    weight = np.zeros(values.size, np.float32)
    scalars: Scalars = (
        LionScalars(0.1, 0.9, 0.99, 0.0) if signed else AdagradScalars(0.1, 1e-8, 0.0, 2)
    )
    for step in range(3):
        optimizer_step(
            np.ones(values.size, np.float32), weight, [block.codes], scalars,
            state_format=StateFormat.INT8, scales=[block.scales],
            noise=noise_of(0, 0, step), **FP32,
        )  # fmt: skip
    assert np.isnan(weight[hit]).all()
    assert np.isfinite(weight[~hit]).all()
    assert np.isnan(block.scales[number])


def run_adam(states: StateFormat, steps: int, curvature: F32, seed: int) -> float:
    """Loss after Adam on 0.5 * sum(curvature * x**2) with noisy gradients, lr falling to 0."""
    numel = curvature.size
    rng = np.random.default_rng(seed)
    formats = Formats(Float.FP32, Float.FP32, states=states)
    zeros = [np.zeros(numel, np.float32) for _ in range(2)]
    start = np.ones(numel, np.float32)
    stored = Stored.of(
        replace(formats, master=formats.master.NONE), ("exp_avg", "exp_avg_sq"), start, zeros
    )
    for step in range(1, steps + 1):
        noisy = stored.weight + 0.1 * rng.standard_normal(numel).astype(np.float32)
        grad = (curvature * noisy).astype(np.float32)
        lr = 0.02 * (1 - (step - 1) / steps)
        stored.step(grad, AdamScalars(lr, 0.9, 0.99, 1e-12, 0.0, step), noise_of(seed, 0, step))
    return float(0.5 * np.sum(curvature * stored.weight.astype(np.float64) ** 2))


@pytest.mark.parametrize("states", [StateFormat.BF16, StateFormat.INT8])
def test_a_quadratic_of_wide_range_converges_as_with_fp32_states(states: StateFormat) -> None:
    rng = np.random.default_rng(0)
    curvature = (2.0 ** rng.normal(0, 3, 8 * BLOCK)).astype(np.float32)
    start = 0.5 * float(curvature.sum())
    exact = run_adam(StateFormat.FP32, 400, curvature, seed=1)
    got = run_adam(states, 400, curvature, seed=1)
    assert exact < 0.01 * start
    assert got < 1.25 * exact
