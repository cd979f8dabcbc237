"""Accumulators."""

from __future__ import annotations

import math

import pytest
import torch

from offload.kernels.floats import Float, serial
from offload.swap.states.state import MemoryState
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import MemoryTier
from offload.tiers.tier import Tier
from offload.zero.gradients.gradients import GradientAccumulator
from offload.zero.groups.layout import ParamShape, lay_out


@pytest.fixture
def make():
    tier = MemoryTier(Tier.HOST, 1 << 20, HostMemory(1 << 20), Ledger())
    layout = lay_out([ParamShape(("w",), (70, 3)), ParamShape(("b",), (5,))])

    def state(itemsize: int) -> MemoryState:
        size = layout.numel_trainable * itemsize
        lease = tier.lease(size, owner="gradients", state_class=StateClass.GRADIENTS)
        return MemoryState("gradients", size, 4096, lease)

    def accumulator(own: Float, accumulate: Float | None = None) -> GradientAccumulator:
        return GradientAccumulator("g", layout.params, own, accumulate or own, state, serial)

    return accumulator


def test_one_pass_keeps_16_bit_gradients_as_they_are(make):
    gradients = make(Float.BF16)
    gradient = torch.randn(70, 3).bfloat16()
    gradients.add(0, gradient)
    kept = gradients.read(0)
    assert kept is not None
    assert kept.dtype is torch.bfloat16
    assert torch.equal(kept, gradient)
    assert gradients.read(1) is None


@pytest.mark.parametrize("planned", [False, True])
def test_the_sum_of_several_passes_is_the_fp32_sum_whether_planned_or_not(make, planned):
    gradients = make(Float.BF16, Float.FP32 if planned else None)
    parts = [torch.randn(70, 3).bfloat16() for _ in range(3)]
    for part in parts:
        gradients.add(0, part)
    expected = parts[0].float() + parts[1].float() + parts[2].float()
    assert torch.equal(gradients.read(0), expected)


def test_the_norm_is_that_of_what_was_accumulated(make):
    gradients = make(Float.FP32)
    w, b = torch.randn(70, 3), torch.randn(5)
    for _ in range(2):
        gradients.add(0, w)
        gradients.add(1, b)
    norm = math.sqrt(gradients.square(0) + gradients.square(1))
    exact = torch.cat([w.flatten(), b]).double().norm() * 2
    assert norm == pytest.approx(float(exact), rel=1e-7)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_non_finite_gradient_makes_the_norm_non_finite(make, bad):
    gradients = make(Float.FP16)
    values = torch.ones(5, dtype=torch.float16)
    values[3] = bad
    gradients.add(1, values)
    assert not math.isfinite(gradients.square(1))


def test_gradients_of_any_layout_are_taken(make):
    gradients = make(Float.FP32)
    transposed = torch.randn(3, 70).t()
    gradients.add(0, transposed)
    assert torch.equal(gradients.read(0), transposed)
    gradients.clear()
    gradients.add(1, torch.ones(()).expand(5))
    assert torch.equal(gradients.read(1), torch.ones(5))


def test_a_cleared_accumulator_starts_anew(make):
    gradients = make(Float.FP32)
    gradients.add(1, torch.ones(5))
    gradients.clear()
    assert not gradients.has_any
    gradients.add(1, torch.full((5,), 2.0))
    assert torch.equal(gradients.read(1), torch.full((5,), 2.0))
