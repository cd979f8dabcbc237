"""AdamW and Adam on flat arrays: one pass from the gradient to the new weight.

The pass reads a gradient in fp32, bf16 or fp16, scales it (loss unscaling times clip coefficient,
one number), updates both fp32 moments and the weight, and writes the weight in its own format. The
fp32 master of a 16-bit weight is one of (`Master`):

    NONE   the weight is fp32 itself
    SPLIT  the bf16 weight is the high half of the master, an int16 array the low half:
           bits = (high << 16) + low
    FP32   an array of its own; the bf16 or fp16 weight is only written

With a gradient as wide as the weight they move 28, 26 and 28 bytes of memory per parameter. The
mathematics is that of `torch.optim.AdamW` (and of `Adam`, where weight decay is not decoupled), and
the results agree with its to fp32 rounding.

Guarantee: the bits of an element's result depend on its inputs and on the scalars only. Not on
where a runner cut the range, on the alignment of arrays, on the number of threads, on whether
vector or scalar code met the element, or on the vector length of the CPU. Any implementation keeps
them that performs, per element, this sequence. Each line rounds once, to nearest even, denormals
kept (fma.rn, mul.rn, div.rn, sqrt.rn on a GPU). Capitals are fp32 constants, each computed in
double precision from `AdamScalars` and then rounded to fp32:

    S  = grad_scale, negated to maximize       C1 = 1 - beta1
    B2 = beta2                                 C2 = 1 - beta2
    R  = 1 / sqrt(1 - beta2**step)             E  = eps
    D  = 1 - lr * weight_decay (decoupled) or weight_decay (not decoupled)
    A  = -lr / (1 - beta1**step)

    g  = fp32(gradient) * S
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

The new p is written as fp32, as bf16 or fp16 rounded to nearest even (beyond the largest finite
value: infinity), or as the two halves of a split master; `kernels.convert` defines those, and what
they do near infinity. A NaN stays a NaN; its payload is not specified.

Explicit vectors in bursts were measured to be faster than what the auto-vectoriser makes of the
same loop, and they are what gives the guarantee: see `kernels.lanes`. Without forming g - m, the
first moment is exact for beta1 = 0 and cannot overflow between two large values of opposite sign.
"""

import math
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from offload.kernels.adam_loop import Master, adam_loop, variant_code
from offload.kernels.convert import decode, encode, join_master, split_master
from offload.kernels.floats import (
    Array,
    Body,
    Float,
    Runner,
    check_input,
    check_output,
    numel_of,
    serial,
)

__all__ = [
    "AdamScalars",
    "Body",
    "Float",
    "Master",
    "Runner",
    "adam_step",
    "decode",
    "encode",
    "join_master",
    "serial",
    "split_master",
]

_FP32 = np.dtype(np.float32)
_INT16 = np.dtype(np.int16)


@dataclass(frozen=True, slots=True)
class AdamScalars:
    """The numbers of one step, the same for every element of a parameter group.

    `step` counts from 1. `grad_scale` multiplies the gradient before anything else. Make one of
    these per step and group, not per parameter: the fp32 constants are computed here.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0
    decoupled: bool = True
    maximize: bool = False
    constants: Array = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        object.__setattr__(self, "constants", np.array(self._constants(), dtype=np.float32))

    def _constants(self) -> tuple[float, ...]:
        correction1 = 1.0 - self.beta1**self.step
        correction2 = 1.0 - self.beta2**self.step
        return (
            -self.grad_scale if self.maximize else self.grad_scale,
            1.0 - self.beta1,
            self.beta2,
            1.0 - self.beta2,
            1.0 / math.sqrt(correction2),
            self.eps,
            1.0 - self.lr * self.weight_decay if self.decoupled else self.weight_decay,
            -self.lr / correction1,
        )

    def _check(self) -> None:
        if self.step < 1:
            raise ValueError(f"step: expected 1 or more, got {self.step}")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}: expected 0 <= {name} < 1, got {getattr(self, name)}")
        if not 0.0 <= self.eps < math.inf:
            raise ValueError(f"eps: expected a finite number of 0 or more, got {self.eps}")
        for name in ("lr", "weight_decay", "grad_scale"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}: expected a finite number, got {getattr(self, name)}")


def adam_step(
    grad: Array,
    weight: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    scalars: AdamScalars,
    *,
    grad_float: Float,
    weight_float: Float,
    low: Array | None = None,
    master: Array | None = None,
    max_exp_avg_sq: Array | None = None,
    run: Runner = serial,
) -> None:
    """Update `weight`, both moments and what else is given, in place, from `grad`.

    All arrays are (numel,), contiguous, and do not overlap. `grad` and `weight` hold what
    `grad_float` and `weight_float` say (16-bit floats as uint16 bits); `exp_avg`, `exp_avg_sq` and
    `max_exp_avg_sq` are fp32; the last one makes it amsgrad. An fp32 weight takes no master. A
    16-bit weight needs one: `low` (int16; bf16 weights only) or `master` (fp32), not both.

    Blocks until `run` has covered every element; `grad` is left as it was. ValueError, before
    anything is written, names the argument that does not fit.
    """
    numel = numel_of("weight", weight)
    kind = _master(weight_float, low, master)
    check_input("grad", grad, grad_float.storage, numel)
    check_output("weight", weight, weight_float.storage, numel)
    check_output("exp_avg", exp_avg, _FP32, numel)
    check_output("exp_avg_sq", exp_avg_sq, _FP32, numel)
    extra, largest = weight, exp_avg_sq  # unused arguments still need an array
    if low is not None:
        check_output("low", low, _INT16, numel)
        extra = low
    if master is not None:
        check_output("master", master, _FP32, numel)
        extra = master
    if max_exp_avg_sq is not None:
        check_output("max_exp_avg_sq", max_exp_avg_sq, _FP32, numel)
        largest = max_exp_avg_sq
    amsgrad = max_exp_avg_sq is not None
    kernel = adam_loop(variant_code(grad_float, weight_float, kind, scalars.decoupled, amsgrad))
    arrays = (grad, weight, extra, exp_avg, exp_avg_sq, largest)
    run(partial(kernel, *arrays, scalars.constants), numel)


def _master(weight_float: Float, low: Array | None, master: Array | None) -> Master:
    """Which variant the arguments ask for; ValueError if they contradict each other."""
    if low is not None and master is not None:
        raise ValueError("low, master: expected one of them, got both")
    if weight_float is Float.FP32:
        if low is None and master is None:
            return Master.NONE
        raise ValueError("low, master: an fp32 weight is its own master, expected neither")
    if master is not None:
        return Master.FP32
    if low is None:
        raise ValueError(f"low, master: {weight_float.name} weights need one of them, got neither")
    if weight_float is not Float.BF16:
        raise ValueError(f"low: only a BF16 weight can be split, got {weight_float.name}")
    return Master.SPLIT
