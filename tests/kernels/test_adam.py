"""`adam_step` equals the reference bit for bit, for every format, size and kind of value."""

import math
from dataclasses import replace

import numpy as np
import pytest

from offload.kernels.cpu.optimizer import Master
from offload.kernels.floats import Array, Float
from offload.kernels.rules import AdamScalars
from tests.kernels import reference
from tests.kernels.adam_cases import (
    FORMATS,
    SCALARS,
    SIZES,
    SPECIAL,
    Parameter,
    adam_step,
    assert_same,
    random_gradient,
    random_state,
    wild_state,
)

BF16_SPLIT = (Float.BF16, Float.BF16, Master.SPLIT)


def check(
    state: reference.AdamState,
    grad: Array,
    scalars: AdamScalars,
    formats: tuple[Float, Float, Master] = BF16_SPLIT,
) -> None:
    """Step a parameter in the given formats, and the reference, and compare all arrays."""
    grad_float, weight_float, master = formats
    parameter = Parameter.of(state, weight_float, master)
    parameter.step(grad, scalars, grad_float)
    after = reference.adam_step(state, reference.decode(grad, grad_float), scalars)
    expected = Parameter.of(after, weight_float, master).arrays()
    for name, array in parameter.arrays().items():
        if name == "weight" and weight_float is not Float.FP32:
            array = reference.decode(array, weight_float)
            assert_same(array, reference.decode(expected[name], weight_float), name)
        else:
            assert_same(array, expected[name], name)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("numel", SIZES)
def test_every_format_and_size_matches_reference(
    numel: int, formats: tuple[Float, Float, Master]
) -> None:
    check(random_state(numel), random_gradient(numel, formats[0]), SCALARS, formats)


@pytest.mark.parametrize("formats", FORMATS)
def test_every_kind_of_value_matches_reference(formats: tuple[Float, Float, Master]) -> None:
    numel = 20_011
    values = np.random.default_rng(1).choice(SPECIAL, numel)
    check(wild_state(numel), reference.encode(values, formats[0]), SCALARS, formats)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_every_option_matches_reference(amsgrad: bool, decoupled: bool, maximize: bool) -> None:
    scalars = replace(SCALARS, decoupled=decoupled, maximize=maximize)
    numel = 5003
    for state in (random_state(numel, amsgrad=amsgrad), wild_state(numel, amsgrad=amsgrad)):
        check(state, random_gradient(numel, Float.BF16), scalars)


@pytest.mark.parametrize(
    "scalars",
    [
        AdamScalars(1e-3, 0.0, 0.0, 1e-8, 0.0, step=1),
        AdamScalars(0.0, 0.9, 0.95, 0.0, 0.1, step=1),
        AdamScalars(1e-3, 0.3, 0.5, 1e-30, 0.1, step=10**9),
        AdamScalars(-1.0, 0.9, 0.999, 1.0, 2.0, step=2, grad_scale=0.0),
        AdamScalars(1e-3, 0.9, 0.999, 1e-8, 0.1, step=2, grad_scale=2.0**-130),
    ],
)
def test_unusual_scalars_match_reference(scalars: AdamScalars) -> None:
    numel = 1013
    check(random_state(numel), random_gradient(numel, Float.BF16), scalars)


def test_without_history_beta1_of_zero_takes_the_gradient_as_it_is() -> None:
    state = random_state(500)
    grad = random_gradient(500, Float.FP32)
    parameter = Parameter.of(state, Float.FP32, Master.NONE)
    parameter.step(grad, AdamScalars(1e-3, 0.0, 0.9, 1e-8, 0.0, step=1), Float.FP32)
    assert_same(parameter.exp_avg, grad)


def test_nan_and_infinity_stay_what_they_are_in_a_split_master() -> None:
    weight = np.array([np.nan, np.inf, -np.inf, 3.4028235e38, 1.0], np.float32)
    state = reference.AdamState(weight, np.zeros(5, np.float32), np.ones(5, np.float32))
    parameter = Parameter.of(state, Float.BF16, Master.SPLIT)
    scalars = AdamScalars(1e-3, 0.9, 0.999, 1e-8, 0.0, step=1)
    parameter.step(np.zeros(5, np.uint16), scalars, Float.BF16)
    assert parameter.low is not None
    assert_same(reference.join_master(parameter.weight, parameter.low), weight)
    seen = reference.decode(parameter.weight, Float.BF16)
    assert np.isnan(seen[0])
    assert seen.tolist()[1:] == [math.inf, -math.inf, math.inf, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_makes_a_nan_of_its_weight_only(bad: float) -> None:
    state = random_state(40)
    parameter = Parameter.of(state, Float.BF16, Master.SPLIT)
    grad = np.zeros(40, np.float32)
    grad[[3, 39]] = bad
    parameter.step(grad, SCALARS, Float.FP32)
    wrong = np.isnan(reference.decode(parameter.weight, Float.BF16))
    assert np.flatnonzero(wrong).tolist() == [3, 39]


@pytest.mark.parametrize("grad_float", list(Float))
def test_split_master_equals_fp32_master_over_200_steps(grad_float: Float) -> None:
    numel = 1000
    state = random_state(numel)
    state.exp_avg[:] = state.exp_avg_sq[:] = 0
    split = Parameter.of(state, Float.BF16, Master.SPLIT)
    whole = Parameter.of(state, Float.BF16, Master.FP32)
    for step in range(1, 201):
        grad = random_gradient(numel, grad_float, seed=step)
        for parameter in (split, whole):
            parameter.step(grad, replace(SCALARS, step=step), grad_float)
    assert split.low is not None
    assert whole.master is not None
    assert_same(reference.join_master(split.weight, split.low), whole.master)
    assert_same(split.exp_avg_sq, whole.exp_avg_sq)


def test_error_against_fp64_over_200_steps() -> None:
    numel = 4000
    start = random_state(numel)
    start.exp_avg[:] = start.exp_avg_sq[:] = 0
    parameter = Parameter.of(start, Float.FP32, Master.NONE)
    exact = reference.AdamState(
        *(array.astype(np.float64) for array in (start.weight, start.exp_avg, start.exp_avg_sq))
    )
    for step in range(1, 201):
        scalars = replace(SCALARS, step=step)
        grad = random_gradient(numel, Float.FP32, seed=step)
        parameter.step(grad, scalars, Float.FP32)
        exact = reference.adam_step_fp64(exact, grad.astype(np.float64), scalars)
    # Most of it is the decay 1 - lr * weight_decay, rounded to fp32 as torch does: 3e-8 a step.
    error = np.linalg.norm(parameter.weight - exact.weight) / np.linalg.norm(exact.weight)
    assert error < 5e-6
    np.testing.assert_allclose(parameter.exp_avg_sq, exact.exp_avg_sq, rtol=4e-5)


def test_the_gradient_is_left_as_it_was_and_may_be_read_only() -> None:
    grad = random_gradient(100, Float.BF16)
    before = grad.copy()
    grad.flags.writeable = False
    Parameter.of(random_state(100), Float.BF16, Master.SPLIT).step(grad, SCALARS, Float.BF16)
    assert_same(grad, before)


def fp32_step(**other: Array | Float | None) -> None:
    """A step that is fine but for the arguments given."""
    arguments: dict[str, Array | Float | None] = {
        name: np.zeros(8, np.float32) for name in ("grad", "weight", "exp_avg", "exp_avg_sq")
    }
    formats = {"grad_float": Float.FP32, "weight_float": Float.FP32}
    adam_step(scalars=SCALARS, **(arguments | formats | other))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grad": np.zeros(7, np.float32)}, r"grad: expected shape \(8,\), got \(7,\)"),
        ({"grad": np.zeros(8)}, "grad: expected dtype float32, got float64"),
        ({"weight": np.zeros((2, 4), np.float32)}, r"weight: expected a 1-D array.*\(2, 4\)"),
        ({"exp_avg": np.zeros(16, np.float32)[::2]}, "exp_avg: expected a contiguous array"),
        ({"exp_avg_sq": np.frombuffer(bytes(32), np.float32)}, "exp_avg_sq: expected a writable"),
        ({"exp_avg": np.zeros(33, np.uint8)[1:].view(np.float32)}, "exp_avg: expected 4-byte"),
        ({"max_exp_avg_sq": np.zeros(9, np.float32)}, r"max_exp_avg_sq: expected shape \(8,\)"),
        ({"low": np.zeros(8, np.int16)}, "an fp32 weight is its own master"),
        ({"weight_float": Float.FP16}, "an FP16 weight needs a master, got neither"),
        ({"weight_float": Float.FP16, "low": np.zeros(8, np.int16)}, "only a BF16 weight"),
        (
            {"low": np.zeros(8, np.int16), "master": np.zeros(8, np.float32)},
            "expected one of them, got both",
        ),
        (
            {"weight_float": Float.BF16, "low": np.zeros(8, np.int16)},
            "weight: expected dtype uint",
        ),
    ],
)
def test_a_bad_argument_is_named(arguments: dict[str, Array | Float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp32_step(**arguments)


@pytest.mark.parametrize(
    "change",
    [{"step": 0}, {"beta1": 1.0}, {"beta2": -0.1}, {"eps": -1.0}, {"lr": math.inf},
     {"grad_scale": math.nan}],
)  # fmt: skip
def test_a_bad_scalar_is_named(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(change))}: expected"):
        replace(SCALARS, **change)  # type: ignore[arg-type]
