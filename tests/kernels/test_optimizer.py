"""`optimizer_step` equals the reference bit for bit: every rule, format, size, kind of value."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.kernels.cpu.int8 import BLOCK
from offload.kernels.cpu.optimizer import optimizer_step
from offload.kernels.floats import Body, Float, Runner
from offload.kernels.rules import AdamScalars, LionScalars, Scalars, SgdScalars, StateFormat
from offload.kernels.variants import Master
from tests.kernels import reference
from tests.kernels.step_cases import (
    NOISE,
    RULES,
    UNUSUAL,
    WEIGHTS,
    Draw,
    Formats,
    Stored,
    calm,
    wild,
)

pytestmark = pytest.mark.sample(8)

SIZES = [0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 255, 256, 257, 288, 1000, 4099]
ADAM_FORMATS = [
    Formats(grad, weight, master, states)
    for grad in Float
    for weight, master in WEIGHTS
    for states in StateFormat
]
OTHER_FORMATS = [
    Formats(weight, weight, master, states) for weight, master in WEIGHTS for states in StateFormat
]
FORMATS = [
    Formats(),
    Formats(Float.FP32, Float.FP32, Master.NONE),
    Formats(master=Master.FP32),
    Formats(Float.FP16, Float.FP16, Master.FP32),
    Formats(master=Master.NONE),
    Formats(states=StateFormat.BF16),
    Formats(states=StateFormat.INT8),
    Formats(Float.FP32, Float.FP32, Master.NONE, StateFormat.BF16),
    Formats(Float.FP16, Float.FP16, Master.FP32, StateFormat.INT8),
    Formats(Float.BF16, Float.BF16, Master.NONE, StateFormat.INT8),
]
WHOLE = Formats(Float.FP32, Float.FP32, Master.NONE)


def check(
    scalars: Scalars, formats: Formats, numel: int, draw: Draw, count: int | None = None
) -> None:
    grad = reference.encode(draw(numel), formats.grad)
    stored = Stored.draw(scalars, formats, numel, draw, count)
    expected = stored.copy()
    stored.step(grad, scalars)
    expected.reference_step(grad, scalars)
    stored.assert_same(expected)


@pytest.mark.parametrize("formats", ADAM_FORMATS, ids=str)
@pytest.mark.parametrize("kind", [calm, wild])
def test_adam_in_every_format_matches_reference(formats: Formats, kind: type) -> None:
    check(RULES["adamw"], formats, 2050, kind(1))


@pytest.mark.parametrize("formats", OTHER_FORMATS, ids=str)
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "adamw"])
def test_every_rule_matches_reference(rule: str, formats: Formats, long: bool) -> None:
    if not long and (list(RULES).index(rule) + OTHER_FORMATS.index(formats)) % 4:
        pytest.skip("each rule in every fourth format: --long has all")
    for kind in (calm, wild):
        check(RULES[rule], formats, 1301, kind(2))


@pytest.mark.parametrize("rule", ["adamw", "lion", "adagrad"])
@pytest.mark.parametrize("states", StateFormat)
@pytest.mark.parametrize("numel", SIZES)
def test_every_size_matches_reference(numel: int, states: StateFormat, rule: str) -> None:
    check(RULES[rule], Formats(states=states), numel, calm(numel))


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("kind", [calm, wild])
def test_amsgrad_matches_reference(kind: type, decoupled: bool) -> None:
    scalars = replace(RULES["adamw"], decoupled=decoupled)
    check(scalars, Formats(), 2050, kind(1), count=3)


@pytest.mark.parametrize("scalars", UNUSUAL)
def test_unusual_scalars_match_reference(scalars: AdamScalars) -> None:
    check(scalars, Formats(), 1013, calm(12))


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("elements", [1, 3, 13])
def test_alignment(formats: Formats, elements: int) -> None:
    scalars = RULES["adamw"]
    stored = Stored.draw(scalars, formats, 1301, calm(3))
    moved = stored.moved(elements)
    grad = reference.encode(calm(4)(1301), formats.grad)
    shifted = np.empty(1301 + 5, grad.dtype)[5:]
    shifted[:] = grad
    stored.step(grad, scalars)
    moved.step(shifted, scalars)
    moved.assert_same(stored)


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_threads(formats: Formats, threads: Runner) -> None:
    numel = 100_003
    one = Stored.draw(RULES["adamw"], formats, numel, calm(5))
    many = one.copy()
    grad = reference.encode(calm(6)(numel), formats.grad)
    one.step(grad, RULES["adamw"])
    many.step(grad, RULES["adamw"], run=threads)
    many.assert_same(one)


@pytest.mark.parametrize(
    "formats", [f for f in FORMATS if f.states is not StateFormat.INT8], ids=str
)
@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_vector_body_equals_scalar_tail(rule: str, formats: Formats) -> None:
    """One element at a time never meets a vector."""

    def singly(body: Body, n: int) -> None:
        for index in range(n):
            body(index, index + 1)

    for kind in (calm, wild):
        vector = Stored.draw(RULES[rule], formats, 1301, kind(7))
        scalar = vector.copy()
        grad = reference.encode(kind(8)(1301), formats.grad)
        vector.step(grad, RULES[rule])
        scalar.step(grad, RULES[rule], run=singly)
        scalar.assert_same(vector)


@settings(max_examples=20, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 11), max_size=5),
    formats=st.sampled_from(FORMATS),
    rule=st.sampled_from(sorted(RULES)),
)
def test_chunks(cuts: set[int], formats: Formats, rule: str) -> None:
    """Separate calls on slices, as the chunks of an offloaded optimizer are."""
    numel = 12 * BLOCK - 77
    whole = Stored.draw(RULES[rule], formats, numel, calm(9))
    cut = whole.copy()
    grad = reference.encode(calm(10)(numel), formats.grad)
    whole.step(grad, RULES[rule])
    bounds = [0, *(cut * BLOCK for cut in sorted(cuts)), numel]
    for lo, hi in pairwise(bounds):
        cut.part(lo, hi).step(grad[lo:hi], RULES[rule], NOISE.at(NOISE.first + lo & 0xFFFFFFFF))
    cut.assert_same(whole)


def step(**other: object) -> None:
    """A step that is fine but for the arguments given."""
    arguments: dict[str, object] = {
        "grad": np.zeros(300, np.uint16),
        "weight": np.zeros(300, np.uint16),
        "states": [np.zeros(300, np.uint8) for _ in range(2)],
        "scales": [np.zeros(2, np.float32) for _ in range(2)],
        "scalars": RULES["adamw"],
        "low": np.zeros(300, np.int16),
        "noise": NOISE,
        "grad_float": Float.BF16,
        "weight_float": Float.BF16,
        "state_format": StateFormat.INT8,
    }
    optimizer_step(**(arguments | other))  # type: ignore[arg-type]


def zeros(dtype: type, *sizes: int) -> list[object]:
    return [np.zeros(size, dtype) for size in sizes]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"states": zeros(np.uint8, 300)}, "states: expected exp_avg, exp_avg_sq, got 1 arrays"),
        ({"states": zeros(np.uint8, 300, 299)}, r"exp_avg_sq: expected shape \(300,\)"),
        ({"states": zeros(np.uint16, 300, 300)}, "exp_avg: expected dtype uint8, got uint16"),
        ({"states": zeros(np.uint8, 300, 300, 300)}, "amsgrad needs FP32 states, got INT8"),
        ({"scales": zeros(np.float32, 2)}, "scales: expected 2 for 2 INT8 states, got 1"),
        ({"scales": zeros(np.float32, 2, 3)}, r"scale of exp_avg_sq: expected shape \(2,\)"),
        ({"state_format": StateFormat.BF16, "states": zeros(np.uint16, 300, 300)},
         "scales: expected 0 for 2 BF16 states, got 2"),
        ({"noise": None}, "noise: stochastic rounding needs it"),
        ({"noise": None, "state_format": StateFormat.FP32, "states": zeros(np.float32, 300, 300),
          "scales": (), "low": None}, "noise: stochastic rounding needs it"),
        ({"scalars": LionScalars(1e-3, 0.9, 0.99, 0.0)}, "states: expected exp_avg, got 2"),
        ({"scalars": SgdScalars(1e-3, 0.0, 0.0, 1)}, "expected none .momentum is 0., got 2"),
        ({"grad": np.zeros(299, np.uint16)}, r"grad: expected shape \(300,\), got \(299,\)"),
        ({"grad": np.zeros(300)}, "grad: expected dtype uint16, got float64"),
        ({"grad": np.zeros(600, np.uint16)[::2]}, "grad: expected a contiguous array"),
        ({"grad": np.zeros(601, np.uint8)[1:].view(np.uint16)}, "grad: expected 2-byte"),
        ({"weight": np.zeros((2, 150), np.uint16)}, r"weight: expected a 1-D array.*\(2, 150\)"),
        ({"weight": np.frombuffer(bytes(600), np.uint16)}, "weight: expected a writable"),
        ({"weight_float": Float.FP32}, "an fp32 weight is its own master"),
        ({"weight_float": Float.FP16}, "only a BF16 weight can be split"),
        ({"master": np.zeros(300, np.float32)}, "expected one of them, got both"),
        ({"low": None, "weight_float": Float.FP16}, "an FP16 weight needs a master, got neither"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(**arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SgdScalars(1e-3, 0.0, 0.0, 1, nesterov=True), "^nesterov: needs a momentum"),
        (lambda: SgdScalars(1e-3, -0.5, 0.0, 1), "^momentum: expected"),
        (lambda: SgdScalars(float("inf"), 0.5, 0.0, 1), "^lr: expected"),
        (lambda: AdamScalars(1e-3, 0.9, -0.1, 1e-8, 0.0, 1), "^beta2: expected"),
        (lambda: AdamScalars(1e-3, 0.9, 0.99, -1.0, 0.0, 1), "^eps: expected"),
        (lambda: LionScalars(1e-3, 1.0, 0.99, 0.0), "^beta1: expected"),
        (lambda: AdamScalars(1e-3, 0.9, 0.99, 1e-8, 0.0, 0), "^step: expected"),
    ],
)
def test_a_bad_scalar_is_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
