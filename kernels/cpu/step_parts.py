"""The parts that element-wise and block-wise optimizer loops share: operands, weights, rules."""

from collections.abc import Sequence
from dataclasses import dataclass

from offload.kernels.cpu.lanes import F32, I32, Lanes, Value
from offload.kernels.cpu.noise import random_bits
from offload.kernels.cpu.rule_lanes import RULES
from offload.kernels.floats import Float
from offload.kernels.variants import Master, Variant


@dataclass(frozen=True, slots=True)
class Operands:
    """A kernel's arguments: starts of arrays, and numbers."""

    grad: Value
    weight: Value
    extra: Value  # the split's low half, the fp32 master, or unused
    states: Sequence[Value]
    scales: Sequence[Value]
    key: Value
    weight_key: Value
    first: Value  # number of the first element, i32
    numel: Value
    constants: Sequence[Value]  # fp32 scalars


def constants(vector: Lanes, at: Operands) -> list[Value]:
    return [vector.splat(constant) for constant in at.constants]


def moments_of(
    vector: Lanes, variant: Variant, at: Operands, g: Value, p: Value, states: Sequence[Value]
) -> tuple[Sequence[Value], Sequence[Value]]:
    """Scale the gradient and apply the first part of the rule."""
    c = constants(vector, at)
    g = vector.mul(g, c[0])
    return RULES[variant.rule].moments(vector, variant, c, g, p, states)


def root_of(vector: Lanes, variant: Variant, at: Operands, way: Sequence[Value]) -> Sequence[Value]:
    """Apply the second part, if the rule has one."""
    root = RULES[variant.rule].root
    return way if root is None else root(vector, constants(vector, at), way)


def new_weight(
    vector: Lanes, variant: Variant, at: Operands, p: Value, way: Sequence[Value]
) -> Value:
    """Apply the last two parts: the direction, and the new weight."""
    rule = RULES[variant.rule]
    direction = rule.direction(vector, way)
    return rule.weight(vector, variant, constants(vector, at), p, direction)


def random_halves(
    vector: Lanes, at: Operands, index: Value, key: Value, shift: int = 0
) -> tuple[Value, Value]:
    number = vector.builder.add(at.first, vector.builder.trunc(index, I32))
    return random_bits(vector, number, key, shift)


def load_gradient(vector: Lanes, variant: Variant, at: Operands, index: Value) -> Value:
    if variant.grad is None:
        return vector.constant(F32, 0.0)
    return vector.load(variant.grad, at.grad, index)


def load_weight(vector: Lanes, variant: Variant, at: Operands, index: Value) -> Value:
    if variant.master is Master.SPLIT:
        return vector.load_split(at.weight, at.extra, index)
    if variant.master is Master.FP32:
        return vector.load(Float.FP32, at.extra, index)
    return vector.load(variant.weight, at.weight, index)


def store_weight(vector: Lanes, variant: Variant, at: Operands, p: Value, index: Value) -> None:
    if variant.master is Master.SPLIT:
        vector.store_split(p, at.weight, at.extra, index)
    elif variant.rounds_weight:
        noise, _ = random_halves(vector, at, index, at.weight_key)
        bits = vector.add_noise(p, noise)
        vector.store_bf16(bits, at.weight, index)
    else:
        if variant.master is Master.FP32:
            vector.store(Float.FP32, p, at.extra, index)
        vector.store(variant.weight, p, at.weight, index)
