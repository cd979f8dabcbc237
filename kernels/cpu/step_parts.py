"""The operands of an optimizer loop, and the parts of a step that all loops make with them."""

from collections.abc import Sequence
from dataclasses import dataclass

from offload.kernels.cpu.lanes import F32, I32, Lanes, Value
from offload.kernels.cpu.noise import random_bits
from offload.kernels.cpu.rule_lanes import RULES, RuleLanes
from offload.kernels.floats import Float
from offload.kernels.variants import Master, Variant


@dataclass(frozen=True, slots=True)
class Operands:
    """A kernel's arguments: starts of arrays, and numbers. Methods emit operations on them."""

    variant: Variant
    grad: Value
    weight: Value
    extra: Value  # the split's low half, the fp32 master, or unused
    states: Sequence[Value]
    scales: Sequence[Value]
    key: Value
    weight_key: Value
    first: Value  # number of the first element, i32
    numel: Value
    scalars: Sequence[Value]  # the rule's constants

    @property
    def rule(self) -> RuleLanes:
        return RULES[self.variant.rule]

    def constants(self, vector: Lanes) -> list[Value]:
        """The rule's constants, each in every lane."""
        return [vector.splat(scalar) for scalar in self.scalars]

    def moments(
        self, vector: Lanes, g: Value, p: Value, states: Sequence[Value]
    ) -> tuple[Sequence[Value], Sequence[Value]]:
        """Scale the gradient and apply the first part of the rule."""
        c = self.constants(vector)
        return self.rule.moments(vector, self.variant, c, vector.mul(g, c[0]), p, states)

    def root(self, vector: Lanes, way: Sequence[Value]) -> Sequence[Value]:
        """Apply the second part, if the rule has one."""
        root = self.rule.root
        return way if root is None else root(vector, self.constants(vector), way)

    def new_weight(self, vector: Lanes, p: Value, way: Sequence[Value]) -> Value:
        """Apply the last two parts: the direction, and the new weight."""
        direction = self.rule.direction(vector, way)
        return self.rule.weight(vector, self.variant, self.constants(vector), p, direction)

    def random_halves(
        self, vector: Lanes, index: Value, key: Value, shift: int = 0
    ) -> tuple[Value, Value]:
        number = vector.builder.add(self.first, vector.builder.trunc(index, I32))
        return random_bits(vector, number, key, shift)

    def load_gradient(self, vector: Lanes, index: Value) -> Value:
        if self.variant.grad is None:
            return vector.constant(F32, 0.0)
        return vector.load(self.variant.grad, self.grad, index)

    def load_weight(self, vector: Lanes, index: Value) -> Value:
        if self.variant.master is Master.SPLIT:
            return vector.load_split(self.weight, self.extra, index)
        if self.variant.master is Master.FP32:
            return vector.load(Float.FP32, self.extra, index)
        return vector.load(self.variant.weight, self.weight, index)

    def store_weight(self, vector: Lanes, p: Value, index: Value) -> None:
        if self.variant.master is Master.SPLIT:
            vector.store_split(p, self.weight, self.extra, index)
        elif self.variant.rounds_weight:
            noise, _ = self.random_halves(vector, index, self.weight_key)
            vector.store_bf16(vector.add_noise(p, noise), self.weight, index)
        else:
            if self.variant.master is Master.FP32:
                vector.store(Float.FP32, p, self.extra, index)
            vector.store(self.variant.weight, p, self.weight, index)
