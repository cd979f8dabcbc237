"""The compiled loops of `kernels.adam`, one per combination of formats; see there."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from offload.kernels import jit
from offload.kernels.floats import Float
from offload.kernels.lanes import I16, I64, WIDTH, Lanes, Value, has_wide_registers, sweep

# Elements per round of the loop: a round loads from all arrays, computes, then stores. 128 fill the
# 32 registers of AVX-512 (4 operands of 8 vectors; 256 spill), 16 are what AVX2's 16 can hold.
BURST = 128 if has_wide_registers() else WIDTH
_DIGEST = jit.digest(__file__)


class Master(IntEnum):
    """Where the fp32 weight lives."""

    NONE = 0  # the weight is fp32 itself
    SPLIT = 1  # high half in the bf16 weight, low half in an int16 array
    FP32 = 2  # in an fp32 array of its own; the 16-bit weight is only written


@dataclass(frozen=True, slots=True)
class Variant:
    """What is fixed at compile time."""

    grad: Float
    weight: Float
    master: Master
    decoupled: bool
    amsgrad: bool

    @staticmethod
    def from_code(code: int) -> "Variant":
        """The inverse of `variant_code`."""
        return Variant(
            grad=Float(code & 3),
            weight=Float(code >> 2 & 3),
            master=Master(code >> 4 & 3),
            decoupled=bool(code >> 6 & 1),
            amsgrad=bool(code >> 7 & 1),
        )


def variant_code(grad: Float, weight: Float, master: Master, decoupled: bool, amsgrad: bool) -> int:
    """One integer for a variant, made in every call: hence no object."""
    return grad | weight << 2 | master << 4 | decoupled << 6 | amsgrad << 7


@dataclass(frozen=True, slots=True)
class Pointers:
    """Start of each array; `extra` is the split's low half, the fp32 master, or unused."""

    grad: Value
    weight: Value
    extra: Value
    exp_avg: Value
    exp_avg_sq: Value
    max_exp_avg_sq: Value


@dataclass(frozen=True, slots=True)
class Constants:
    """The fp32 scalars of a step, in the order of `AdamScalars.constants`."""

    grad_scale: Value
    one_minus_beta1: Value
    beta2: Value
    one_minus_beta2: Value
    inverse_root_correction2: Value
    eps: Value
    decay: Value  # 1 - lr * weight_decay when decoupled, else weight_decay
    minus_step_size: Value


@cache
def adam_loop(code: int) -> jit.Kernel:
    """The kernel of `Variant.from_code(code)`; compiled, or loaded from disk, at its first call.

    kernel(grad, weight, extra, exp_avg, exp_avg_sq, max_exp_avg_sq, constants, lo, hi)
    """
    plan = jit.plan(code, _DIGEST)

    def adam(grad, weight, extra, exp_avg, exp_avg_sq, max_exp_avg_sq, constants, lo, hi):  # type: ignore[no-untyped-def]
        _update(plan, grad, weight, extra, exp_avg, exp_avg_sq, max_exp_avg_sq, constants, lo, hi)

    return jit.compiled(adam)


@intrinsic(prefer_literal=True)
def _update(typing, plan, grad, weight, extra, m, v, max_v, constants, lo, hi):  # type: ignore[no-untyped-def]
    code = jit.variant_of(plan)
    if code is None:
        return None
    variant = Variant.from_code(code)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        *arrays, base = jit.pointers(context, builder, signature, args, 1, 8)
        scalars = [_constant(builder, base, index) for index in range(len(Constants.__slots__))]
        lo, hi = jit.integers(context, builder, signature, args, 8, 10)
        loop(builder, variant, Pointers(*arrays), Constants(*scalars), lo, hi)
        return context.get_dummy_value()

    return jit.returns_nothing(plan, grad, weight, extra, m, v, max_v, constants, lo, hi), emit


def _constant(builder: ir.IRBuilder, base: Value, index: int) -> Value:
    return builder.load(builder.gep(base, [I64(index)]))


def loop(
    builder: ir.IRBuilder, variant: Variant, at: Pointers, scalars: Constants, lo: Value, hi: Value
) -> None:
    """Emit the loop over [lo, hi)."""

    def step(vector: Lanes, index: Value) -> Iterator[None]:
        return update(vector, variant, at, scalars, index)

    sweep(builder, lo, hi, BURST, step)


def update(
    vector: Lanes, variant: Variant, at: Pointers, scalars: Constants, index: Value
) -> Iterator[None]:
    """Emit the update of one vector of elements: the sequence that `kernels.adam` documents."""
    c = Constants(*(vector.splat(getattr(scalars, name)) for name in Constants.__slots__))
    g = vector.load(variant.grad, at.grad, index)
    p = _load_weight(vector, variant, at, index)
    m = vector.load(Float.FP32, at.exp_avg, index)
    v = vector.load(Float.FP32, at.exp_avg_sq, index)
    largest = vector.load(Float.FP32, at.max_exp_avg_sq, index) if variant.amsgrad else None
    yield
    g = vector.mul(g, c.grad_scale)
    if variant.decoupled:
        p = vector.mul(p, c.decay)
    else:
        g = vector.fma(c.decay, p, g)
    m = vector.fma(c.one_minus_beta1, g, vector.fma(vector.neg(c.one_minus_beta1), m, m))
    v = vector.fma(vector.mul(c.one_minus_beta2, g), g, vector.mul(c.beta2, v))
    # A NaN in v stays there for good, so the maximum may drop one of its own.
    largest = v if largest is None else vector.maximum(largest, v)
    denominator = vector.fma(vector.sqrt(largest), c.inverse_root_correction2, c.eps)
    p = vector.fma(c.minus_step_size, vector.div(m, denominator), p)
    yield
    vector.store(Float.FP32, m, at.exp_avg, index)
    vector.store(Float.FP32, v, at.exp_avg_sq, index)
    if variant.amsgrad:
        vector.store(Float.FP32, largest, at.max_exp_avg_sq, index)
    _store_weight(vector, variant, at, p, index)


def _load_weight(vector: Lanes, variant: Variant, at: Pointers, index: Value) -> Value:
    if variant.master is Master.NONE:
        return vector.load(Float.FP32, at.weight, index)
    if variant.master is Master.FP32:
        return vector.load(Float.FP32, at.extra, index)
    high = vector.load_raw(I16, at.weight, index)
    return vector.join(high, vector.load_raw(I16, at.extra, index))


def _store_weight(vector: Lanes, variant: Variant, at: Pointers, p: Value, index: Value) -> None:
    if variant.master is Master.SPLIT:
        high, low = vector.split(p)
        vector.store_raw(high, at.weight, index)
        vector.store_raw(low, at.extra, index)
        return
    if variant.master is Master.FP32:
        vector.store(Float.FP32, p, at.extra, index)
    vector.store(variant.weight, p, at.weight, index)
