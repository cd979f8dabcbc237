"""The bits of an element do not depend on what lies around it: cut, alignment, threads."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.kernels.cpu.optimizer import Master
from offload.kernels.floats import Body, Float, Runner
from tests.kernels.adam_cases import (
    SCALARS,
    Parameter,
    assert_same,
    random_gradient,
    random_state,
    wild_state,
)

KINDS = [
    (Float.FP32, Float.FP32, Master.NONE),
    (Float.BF16, Float.BF16, Master.SPLIT),
    (Float.BF16, Float.BF16, Master.FP32),
    (Float.FP16, Float.FP16, Master.FP32),
]
NUMEL = 3001


def assert_same_parameter(got: Parameter, expected: Parameter) -> None:
    for name, array in got.arrays().items():
        assert_same(array, expected.arrays()[name], name)


@pytest.mark.parametrize(("grad_float", "weight_float", "master"), KINDS)
@pytest.mark.parametrize("elements", [1, 3, 8, 13])
def test_alignment(elements: int, grad_float: Float, weight_float: Float, master: Master) -> None:
    plain = Parameter.of(random_state(NUMEL), weight_float, master)
    moved = plain.moved(elements)
    grad = random_gradient(NUMEL, grad_float)
    shifted = np.empty(NUMEL + 5, grad.dtype)[5:]
    shifted[:] = grad
    plain.step(grad, SCALARS, grad_float)
    moved.step(shifted, SCALARS, grad_float)
    assert_same_parameter(moved, plain)


@pytest.mark.parametrize(("grad_float", "weight_float", "master"), KINDS)
def test_threads(grad_float: Float, weight_float: Float, master: Master, threads: Runner) -> None:
    numel = 200_003
    one = Parameter.of(random_state(numel), weight_float, master)
    many = one.moved(0)
    grad = random_gradient(numel, grad_float)
    one.step(grad, SCALARS, grad_float)
    many.step(grad, SCALARS, grad_float, threads)
    assert_same_parameter(many, one)


@pytest.mark.parametrize(("grad_float", "weight_float", "master"), KINDS)
@pytest.mark.parametrize("make", [random_state, wild_state])
def test_vector_body_equals_scalar_tail(
    grad_float: Float, weight_float: Float, master: Master, make: type
) -> None:
    """One element at a time never meets a vector."""

    def singly(body: Body, n: int) -> None:
        for index in range(n):
            body(index, index + 1)

    vector = Parameter.of(make(NUMEL), weight_float, master)
    scalar = vector.moved(0)
    grad = random_gradient(NUMEL, grad_float)
    vector.step(grad, SCALARS, grad_float)
    scalar.step(grad, SCALARS, grad_float, singly)
    if weight_float is Float.FP16:  # its NaNs keep a payload, which is not specified
        for parameter in (vector, scalar):
            parameter.weight[(parameter.weight & 0x7FFF) > 0x7C00] = 0x7E00
    assert_same_parameter(scalar, vector)


@settings(max_examples=60, deadline=None)
@given(cuts=st.sets(st.integers(1, NUMEL - 1), max_size=8), kind=st.sampled_from(KINDS))
def test_chunks(cuts: set[int], kind: tuple[Float, Float, Master]) -> None:
    """Separate calls on slices, as the offloaded optimizer's chunks are."""
    grad_float, weight_float, master = kind
    whole = Parameter.of(random_state(NUMEL), weight_float, master)
    cut = whole.moved(0)
    grad = random_gradient(NUMEL, grad_float)
    whole.step(grad, SCALARS, grad_float)
    bounds = [0, *sorted(cuts), NUMEL]
    for lo, hi in pairwise(bounds):
        cut.part(lo, hi).step(grad[lo:hi], SCALARS, grad_float)
    assert_same_parameter(cut, whole)
