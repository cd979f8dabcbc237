"""The options fixed when an optimizer kernel is compiled."""

from dataclasses import dataclass
from enum import IntEnum

from offload.kernels.floats import Float
from offload.kernels.rules import RULES, Rule, Scalars, StateFormat, is_signed

NO_GRADIENT = 3  # stands for the format of a gradient of zeros
_SIGNED = {scalars.rule: tuple(map(is_signed, scalars.states)) for scalars in RULES}


class Master(IntEnum):
    """The storage of the fp32 weight."""

    NONE = 0  # none: the weight is fp32, or bf16 and rounded stochastically
    SPLIT = 1  # high half in the bf16 weight, low half in an int16 array
    FP32 = 2  # in an fp32 array of its own; the 16-bit weight is only written


@dataclass(frozen=True, slots=True)
class Variant:
    rule: Rule
    flag: bool  # of the rule's scalars
    grad: Float | None  # None: a gradient of zeros, which is not read
    weight: Float
    master: Master
    states: StateFormat
    state_count: int

    @property
    def signed(self) -> tuple[bool, ...]:
        """Whether each state can be negative."""
        return _SIGNED[self.rule][: self.state_count]

    @property
    def rounds_weight(self) -> bool:
        """Whether the weight is bf16 without a master, hence rounded stochastically."""
        return self.master is Master.NONE and self.weight is not Float.FP32

    @staticmethod
    def from_code(code: int) -> "Variant":
        """The inverse of `variant_code`."""
        return Variant(
            Rule(code >> 11),
            bool(code >> 10 & 1),
            Float(code & 3) if code & 3 != NO_GRADIENT else None,
            Float(code >> 2 & 3),
            Master(code >> 4 & 3),
            StateFormat(code >> 6 & 3),
            code >> 8 & 3,
        )


def variant_code(
    rule: Rule, grad: Float | None, weight: Float, master: Master, states: StateFormat,
    state_count: int, *, flag: bool = False,
) -> int:  # fmt: skip
    """One integer for a variant, made in every call: hence no object. The rule comes last, so that
    rules can be added (`jit.plan` checks that the code still fits)."""
    formats = (NO_GRADIENT if grad is None else grad) | weight << 2 | master << 4 | states << 6
    return formats | state_count << 8 | flag << 10 | rule << 11


def master_of(weight: Float, *, low: bool, master: bool) -> Master:
    """The kind of master for the arrays given; ValueError if they contradict each other."""
    if low and master:
        raise ValueError("low, master: expected one of them, got both")
    if weight is Float.FP32 and (low or master):
        raise ValueError("low, master: an fp32 weight is its own master, expected neither")
    if master:
        return Master.FP32
    if low:
        if weight is not Float.BF16:
            raise ValueError(f"low: only a BF16 weight can be split, got {weight.name}")
        return Master.SPLIT
    if weight is Float.FP16:
        raise ValueError(
            "low, master: an FP16 weight needs a master, got neither; only BF16 weights can be "
            "rounded stochastically"
        )
    return Master.NONE


def names_of_states(
    scalars: Scalars, states: int, scales: int, state_format: StateFormat
) -> tuple[str, ...]:
    """The names of so many states; ValueError if the rule cannot work with them, or if there are
    not as many arrays of scales as the format needs."""
    names = scalars.names_of(states)
    if states > 2 and state_format is not StateFormat.FP32:
        raise ValueError(f"states: amsgrad needs FP32 states, got {state_format.name}")
    expected = states if state_format is StateFormat.INT8 else 0
    if scales != expected:
        raise ValueError(
            f"scales: expected {expected} for {states} {state_format.name} states, got {scales}"
        )
    return names
