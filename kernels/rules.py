"""Optimizer rules: their numbers, and the exact sequence of operations each performs per element.

A rule turns a gradient g, a weight p and its states (the arrays that `states` lists) into the new
weight and states. All rules share one frame:

    g  = fp32(gradient) * S          S = grad_scale, negated to maximize
    p, states = the fp32 values of what is stored
    the rule, below
    states and p are stored: rounded, if their format is not fp32. The rule itself works with the
    values before rounding, so the new p does not see how the new states were rounded.

Guarantee: the bits of an element's result depend on its inputs and on the scalars only (with INT8
states on the elements of its block, with stochastic rounding on its number and the keys as well).
Not on where a runner cut the range, on the alignment of arrays, on the number of threads, on
whether vector or scalar code met the element, or on the vector length of the CPU. Any
implementation keeps them that performs this sequence. Each line rounds once, to nearest even,
denormals kept (fma.rn, mul.rn, add.rn, div.rn, sqrt.rn on a GPU); fma only where it is written.
Capitals are fp32 constants, each computed in double precision and then rounded to fp32; they are
the `constants` of the scalars, in the order listed.

Adam, AdamW: `AdamScalars`; exp_avg m, exp_avg_sq v, with amsgrad max_exp_avg_sq x

    S                                          D = 1 - lr * weight_decay (decoupled)
    C1 = 1 - beta1                                 or weight_decay (not decoupled)
    B2 = beta2      C2 = 1 - beta2             A = -lr / (1 - beta1**step)
    R  = 1 / sqrt(1 - beta2**step)             order: S, C1, B2, C2, R, E, D, A
    E  = eps

    p  = p * D                  decoupled
    g  = fma(D, p, g)           not decoupled
    t  = fma(-C1, m, m)
    m  = fma(C1, g, t)
    t  = C2 * g
    u  = B2 * v
    v  = fma(t, g, u)
    x  = v, or with amsgrad x = (x > v) ? x : v
    t  = sqrt(x)
    t  = fma(t, R, E)
    t  = m / t
    p  = fma(A, t, p)

Without forming g - m, the first moment is exact for beta1 = 0 and cannot overflow between two large
values of opposite sign.

Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023): `LionScalars`; exp_avg m

    S, C1 = 1 - beta1, C2 = 1 - beta2, D = 1 - lr * weight_decay, A = -lr       in this order

    p  = p * D
    t  = fma(-C1, m, m)
    t  = fma(C1, g, t)
    u  = (t > 0) ? 1 : (t < 0) ? -1 : t        a zero keeps its sign, a NaN stays one
    p  = fma(A, u, p)
    t  = fma(-C2, m, m)
    m  = fma(C2, g, t)

Adagrad (torch.optim.Adagrad): `AdagradScalars`; sum s

    S, W = weight_decay, E = eps, A = -lr / (1 + (step - 1) * lr_decay)         in this order

    g  = fma(W, p, g)
    s  = fma(g, g, s)
    t  = sqrt(s)
    t  = t + E
    t  = g / t
    p  = fma(A, t, p)

SGD (torch.optim.SGD): `SgdScalars`; momentum_buffer b, if momentum is not 0

    S, W = weight_decay, M = momentum, A = -lr                                  order: S, W, M, K, A
    K  = 1 - dampening, or 1 at step 1 (torch starts the buffer with the whole gradient)

    g  = fma(W, p, g)
    t  = K * g                  with momentum, as the next lines
    b  = fma(M, b, t)
    g  = b, or with nesterov g = fma(M, b, g)
    p  = fma(A, g, p)

All states start at zero (torch's Adagrad can start `sum` at another value; so can the caller here).
A NaN stays a NaN; its payload is not specified.

Muon (torch.optim.Muon) is two rules, as the direction of an element depends on its whole matrix:
`MuonScalars` makes the fp32 input u of products (`zero.step.matrices`), and `MuonWeightScalars`
applies their result g; momentum_buffer m

    S, K1 = 1 - momentum, B1 = 0 or, where K1 >= 0.5, K1 = -momentum, B1 = 1,
    K2 = momentum - 1, B2 = 1 or, where momentum < 0.5, K2 = momentum, B2 = 0, D, A   in this order

    t  = fma(B1, g, fma(-B1, m, m))     the nearer end, from which torch.lerp counts
    m  = fma(K1, g - m, t)
    t  = fma(B2, m, fma(-B2, g, g))
    u  = m, or with nesterov u = fma(K2, m - g, t)

    p  = p * D                  D = 1 - lr * weight_decay
    p  = fma(A, g, p)           A = -lr * max(1, rows / columns)**0.5, or as adjust_lr_fn says
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, ClassVar

import numpy as np

from offload.kernels.floats import Array

BLOCK = 256  # elements of an 8-bit state per scale
SCALE_SUFFIX = ".scale"  # what a record calls the scales of a state, after its name


class Rule(IntEnum):
    """The sequence of operations. A new one is described below, and written twice: as vector
    operations (`rule_lanes`) and in Triton (`triton_rules`)."""

    ADAM = 0
    LION = 1
    ADAGRAD = 2
    SGD = 3
    MUON = 4


class StateFormat(IntEnum):
    """The format of all states of a rule. Stochastic rounding: `kernels.cpu.noise`."""

    FP32 = 0
    BF16 = 1  # uint16 bits, rounded stochastically
    INT8 = 2  # uint8 codes and a scale per block, rounded stochastically: `kernels.cpu.int8`


@dataclass(frozen=True, slots=True)
class Scalars:
    """The numbers of one step by one rule, the same for every element of a parameter group, and the
    rule's properties. Make one per step and group: the fp32 constants are computed here.

    A subclass has the other numbers as fields named as torch names them (of `betas`: beta1, beta2)
    and, if they change with the count of steps, `step`, which counts from 1. `grad_scale`
    multiplies the gradient before anything else. ValueError names a number that is out of range.
    """

    rule: ClassVar[Rule]
    types: ClassVar[Mapping[str, Mapping[str, bool]]]  # optimizer.type -> numbers that it fixes
    defaults: ClassVar[Mapping[str, Any]]  # keys of a param group, with torch's values
    type_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # where a type's differ
    states: ClassVar[tuple[str, ...]]  # all it may keep, in the order in which kernels take them
    counts_steps: ClassVar[bool] = True  # torch keeps `step` for each parameter

    grad_scale: float = field(default=1.0, kw_only=True)
    maximize: bool = field(default=False, kw_only=True)
    constants: Array = field(init=False, repr=False, compare=False)

    @classmethod
    def at(cls, step: int, grad_scale: float, numbers: Mapping[str, Any]) -> "Scalars":
        """The scalars of update number `step`, counted from 1; `numbers` are the other fields."""
        steps: dict[str, Any] = {"step": step} if "step" in cls.__dataclass_fields__ else {}
        return cls(grad_scale=grad_scale, **steps, **numbers)

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.init:
                _check(each.name, getattr(self, each.name))
        scale = -self.grad_scale if self.maximize else self.grad_scale
        constants = np.array([scale, *self._constants()], dtype=np.float32)
        object.__setattr__(self, "constants", constants)

    def _constants(self) -> tuple[float, ...]:
        """The rule's constants behind S, in its order."""
        raise NotImplementedError

    @property
    def flag(self) -> bool:
        """A compile-time switch between two forms of the rule."""
        return False

    @property
    def state_counts(self) -> tuple[int, ...]:
        """The numbers of states that the rule can work with."""
        return (len(self.states),)

    @property
    def loop(self) -> tuple[Rule, bool, tuple[int, ...]]:
        """The key of the compiled loop: steps with equal keys are made by the same loop."""
        return self.rule, self.flag, self.state_counts

    @classmethod
    def kept_for(cls, numbers: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the states that are kept for these values of a param group's keys."""
        return cls.states

    def names_of(self, count: int) -> tuple[str, ...]:
        """Names of `count` states. ValueError if the rule cannot work with that number."""
        if count not in self.state_counts:
            wanted = ", ".join(self.states[: self.state_counts[0]]) or "none (momentum is 0)"
            raise ValueError(f"states: expected {wanted}, got {count} arrays")
        return self.states[:count]


@dataclass(frozen=True, slots=True)
class AdamScalars(Scalars):
    """The numbers of one step of Adam or, if `decoupled`, AdamW."""

    rule: ClassVar = Rule.ADAM
    types: ClassVar = {"adamw": {"decoupled": True}, "adam": {"decoupled": False}}
    defaults: ClassVar = {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False,
        "maximize": False,
    }  # fmt: skip
    type_defaults: ClassVar = {"adam": {"weight_decay": 0.0}}
    states: ClassVar = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True

    @property
    def flag(self) -> bool:
        return self.decoupled

    @property
    def state_counts(self) -> tuple[int, ...]:
        """Two states, or three with amsgrad, in FP32 only."""
        return 2, 3

    @classmethod
    def kept_for(cls, numbers: Mapping[str, Any]) -> tuple[str, ...]:
        return cls.states[: 3 if numbers.get("amsgrad") else 2]

    def _constants(self) -> tuple[float, ...]:
        correction1 = 1.0 - self.beta1**self.step
        correction2 = 1.0 - self.beta2**self.step
        return (
            1.0 - self.beta1,
            self.beta2,
            1.0 - self.beta2,
            1.0 / math.sqrt(correction2),
            self.eps,
            1.0 - self.lr * self.weight_decay if self.decoupled else self.weight_decay,
            -self.lr / correction1,
        )


@dataclass(frozen=True, slots=True)
class LionScalars(Scalars):
    """The numbers of one step of Lion, the same for all steps; weight decay is decoupled."""

    rule: ClassVar = Rule.LION
    types: ClassVar = {"lion": {}}
    defaults: ClassVar = {  # the paper's: torch has none
        "lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False
    }  # fmt: skip
    states: ClassVar = ("exp_avg",)
    counts_steps: ClassVar = False

    lr: float
    beta1: float
    beta2: float
    weight_decay: float

    def _constants(self) -> tuple[float, ...]:
        decay = 1.0 - self.lr * self.weight_decay
        return 1.0 - self.beta1, 1.0 - self.beta2, decay, -self.lr


@dataclass(frozen=True, slots=True)
class AdagradScalars(Scalars):
    """The numbers of one step of Adagrad; weight decay is added to the gradient."""

    rule: ClassVar = Rule.ADAGRAD
    types: ClassVar = {"adagrad": {}}
    defaults: ClassVar = {
        "lr": 1e-2, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0, "maximize": False
    }  # fmt: skip
    states: ClassVar = ("sum",)

    lr: float
    eps: float
    weight_decay: float
    step: int
    lr_decay: float = 0.0

    def _constants(self) -> tuple[float, ...]:
        rate = self.lr / (1.0 + (self.step - 1) * self.lr_decay)
        return self.weight_decay, self.eps, -rate


@dataclass(frozen=True, slots=True)
class SgdScalars(Scalars):
    """The numbers of one step of SGD; weight decay is added to the gradient.

    `step` counts from 1 and matters with dampening only: the first step's gradient is not damped.
    (torch leaves the first one after a momentum of 0 undamped, too, whenever that is.)
    """

    rule: ClassVar = Rule.SGD
    types: ClassVar = {"sgd": {}}
    defaults: ClassVar = {
        "lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False,
        "maximize": False,
    }  # fmt: skip
    states: ClassVar = ("momentum_buffer",)
    counts_steps: ClassVar = False

    lr: float
    momentum: float
    weight_decay: float
    step: int
    dampening: float = 0.0
    nesterov: bool = False

    def _constants(self) -> tuple[float, ...]:
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ValueError(
                f"nesterov: needs a momentum above 0 and no dampening, got momentum"
                f" {self.momentum}, dampening {self.dampening}"
            )
        kept = 1.0 if self.step == 1 else 1.0 - self.dampening
        return self.weight_decay, self.momentum, kept, -self.lr

    @property
    def flag(self) -> bool:
        return self.nesterov

    @property
    def state_counts(self) -> tuple[int, ...]:
        return (int(self.momentum != 0.0),)

    @classmethod
    def kept_for(cls, numbers: Mapping[str, Any]) -> tuple[str, ...]:
        return cls.states if numbers.get("momentum", True) else ()


@dataclass(frozen=True, slots=True)
class MuonScalars(Scalars):
    """The numbers of one step of Muon. As a rule they make its input, whose weight is an fp32 array
    that must be finite before; `weight` has the numbers of the pass behind it."""

    rule: ClassVar = Rule.MUON
    types: ClassVar = {"muon": {}}
    defaults: ClassVar = {
        "lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True,
        "ns_coefficients": (3.4445, -4.7750, 2.0315), "eps": 1e-7, "ns_steps": 5,
        "adjust_lr_fn": None,
    }  # fmt: skip
    states: ClassVar = ("momentum_buffer",)
    counts_steps: ClassVar = False

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_a: float
    ns_b: float
    ns_c: float
    eps: float
    ns_steps: float
    matches_adamw: bool  # adjust_lr_fn: match_rms_adamw

    @property
    def flag(self) -> bool:
        return self.nesterov

    def _constants(self) -> tuple[float, ...]:
        if not 0 <= self.ns_steps < 100 or self.ns_steps % 1:
            raise ValueError(f"ns_steps: expected an integer from 0 to 99, got {self.ns_steps}")
        k1, b1 = _lerp(1.0 - self.momentum)
        return k1, b1, *_lerp(self.momentum), 0.0, 1.0

    def weight(self, rows: int, columns: int) -> "MuonWeightScalars":
        """The numbers of the pass that changes the weights of a matrix."""
        ratio = math.sqrt(max(1, rows / columns))
        if self.matches_adamw:
            ratio = 0.2 * math.sqrt(max(rows, columns))
        return MuonWeightScalars(1.0 - self.lr * self.weight_decay, -(self.lr * ratio))


@dataclass(frozen=True, slots=True)
class MuonWeightScalars(Scalars):
    """Muon's second pass: the gradient is what the products made of the first one's result."""

    rule: ClassVar = Rule.MUON
    states: ClassVar = ()

    decay: float
    step_size: float  # negative

    def _constants(self) -> tuple[float, ...]:
        return 0.0, 0.0, 0.0, 0.0, self.decay, self.step_size


def _lerp(weight: float) -> tuple[float, float]:
    """The factor and the end (0: the first) with which torch.lerp computes, in fp32."""
    single = np.float32(weight)
    return (float(single), 0.0) if abs(single) < 0.5 else (float(single - np.float32(1)), 1.0)


RULES: tuple[type[Scalars], ...] = (AdamScalars, LionScalars, AdagradScalars, SgdScalars)
RULES += (MuonScalars,)
_NEVER_NEGATIVE = frozenset({"exp_avg_sq", "max_exp_avg_sq", "sum"})


def is_signed(name: str) -> bool:
    """Whether a state can be negative: it has another 8-bit code than one that cannot."""
    return name not in _NEVER_NEGATIVE


def _check(name: str, value: float) -> None:
    """Raise ValueError where a number is out of its range."""
    if name == "step" and value < 1:
        raise ValueError(f"step: expected 1 or more, got {value}")
    if name in ("beta1", "beta2") and not 0.0 <= value < 1.0:
        raise ValueError(f"{name}: expected 0 <= {name} < 1, got {value}")
    if name in ("eps", "lr_decay", "momentum") and not 0.0 <= value < math.inf:
        raise ValueError(f"{name}: expected a finite number of 0 or more, got {value}")
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value}")
