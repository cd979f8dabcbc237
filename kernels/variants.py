"""What is fixed when an optimizer kernel is compiled."""

from dataclasses import dataclass
from enum import IntEnum

from offload.kernels.floats import Float
from offload.kernels.rules import Rule, StateFormat


class Master(IntEnum):
    """Where the fp32 weight lives."""

    NONE = 0  # nowhere else: the weight is fp32, or bf16 and rounded stochastically
    SPLIT = 1  # high half in the bf16 weight, low half in an int16 array
    FP32 = 2  # in an fp32 array of its own; the 16-bit weight is only written


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel. The flags of other rules than its own are False."""

    rule: Rule
    grad: Float
    weight: Float
    master: Master
    states: StateFormat
    decoupled: bool = False  # Adam: decay the weight, do not add to the gradient
    amsgrad: bool = False
    momentum: bool = False  # SGD
    nesterov: bool = False

    @property
    def state_count(self) -> int:
        if self.rule is Rule.SGD:
            return int(self.momentum)
        return 2 + self.amsgrad if self.rule is Rule.ADAM else 1

    @property
    def signed(self) -> tuple[bool, ...]:
        """Of each state that may be 8-bit: whether it can be negative."""
        if self.rule is Rule.ADAGRAD:
            return (False,)
        return (True, False)[: self.state_count]

    @property
    def rounds_weight(self) -> bool:
        """Whether the weight is bf16 without a master, hence rounded stochastically."""
        return self.master is Master.NONE and self.weight is not Float.FP32

    @staticmethod
    def from_code(code: int) -> "Variant":
        """The inverse of `variant_code`."""
        return Variant(
            Rule(code & 3),
            Float(code >> 2 & 3),
            Float(code >> 4 & 3),
            Master(code >> 6 & 3),
            StateFormat(code >> 8 & 3),
            *(bool(code >> place & 1) for place in range(10, 14)),
        )


def variant_code(
    rule: Rule,
    grad: Float,
    weight: Float,
    master: Master,
    states: StateFormat,
    *,
    decoupled: bool = False,
    amsgrad: bool = False,
    momentum: bool = False,
    nesterov: bool = False,
) -> int:
    """One integer of 14 bits for a variant, made in every call: hence no object."""
    flags = decoupled | amsgrad << 1 | momentum << 2 | nesterov << 3
    return rule | grad << 2 | weight << 4 | master << 6 | states << 8 | flags << 10
