"""Dynamic loss scaling for fp16: halve on overflow, double after a run of good steps.

The rule of `torch.amp.GradScaler` to the bit (and of mixed-precision training, Micikevicius et al.
2018): the scale is an fp32 number, may fall below 1, and does not grow to infinity.
"""

from __future__ import annotations

import math
from ctypes import c_float
from dataclasses import dataclass


@dataclass(slots=True)
class LossScale:
    """`scale` multiplies the loss; `update` says after every step whether it overflowed.

    It never falls below `min_scale`, nor to where fp32 has no inverse of it (below 2**-127), which
    GradScaler leaves only downwards, to 0.
    """

    scale: float = 65536.0
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 0.0
    good_steps: int = 0

    def __post_init__(self) -> None:
        self.scale = _fp32(self.scale)

    def update(self, *, overflow: bool) -> None:
        """Change the scale after a step that was skipped for an `overflow`, or made."""
        if overflow:
            self.good_steps = 0
            self._change_to(max(self.scale * self.backoff_factor, self.min_scale))
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.good_steps = 0
            self._change_to(self.scale * self.growth_factor)

    def _change_to(self, scale: float) -> None:
        """Change the scale, unless gradients could not be divided by it."""
        rounded = _fp32(scale)
        if has_inverse(rounded):
            self.scale = rounded


def has_inverse(scale: float) -> bool:
    """Return whether it and 1 / `scale` are fp32 numbers above 0."""
    return 0 < _fp32(scale) < math.inf and _fp32(1 / _fp32(scale)) < math.inf


def _fp32(value: float) -> float:
    """Round to nearest even, and to infinity if it is too large."""
    return c_float(value).value
