"""Steps with gradients that are not finite: dynamic loss scaling, and what is said of them.

The loss scale of fp16: halve on overflow, double after a run of good steps.

The rule of `torch.amp.GradScaler` to the bit (and of mixed-precision training, Micikevicius et al.
2018): the scale is an fp32 number, may fall below 1, and does not grow to infinity.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_float
from dataclasses import dataclass

import torch

from offload.tiers.errors import NonfiniteError

_log = logging.getLogger("offload")


@dataclass(slots=True)
class LossScale:
    """`scale` multiplies the loss; `update` says after every step whether it overflowed.

    It never falls below `min_scale`, nor to where fp32 has no inverse of it (below 2**-127), which
    GradScaler leaves only downwards, to 0.
    """

    scale: float = 65536.0
    growth_interval: int = 2000
    min_scale: float = 0.0
    good_steps: int = 0
    is_applied: bool = False  # inside `applied`

    def __post_init__(self) -> None:
        self.scale = _fp32(self.scale)

    @contextmanager
    def applied(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the loss times the scale, for its backward inside."""
        self.is_applied = True
        try:
            yield loss * self.scale
        finally:
            self.is_applied = False

    def update(self, *, overflow: bool) -> None:
        """Change the scale after a step that was skipped for an `overflow`, or made."""
        if overflow:
            self.good_steps = 0
            self._change_to(max(self.scale / 2, self.min_scale))
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.good_steps = 0
            self._change_to(self.scale * 2)

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


class NonfiniteSteps:
    """The reports of a stepper's non-finite steps, by parameter, and their number in a row. The
    first one is a warning, later ones are information: under fp16 some are normal."""

    def __init__(self, max_in_a_row: int) -> None:
        """`max_in_a_row` is the number of skipped steps in a row before `check` raises."""
        self._max_in_a_row = max_in_a_row
        self._said = False
        self._names: Sequence[str] = ()
        self._scale: float | None = None
        self.in_a_row = 0  # skipped, until now

    def note(
        self, step: int, names: Sequence[str], params: int, *, skipped: bool, scale: float | None
    ) -> None:
        """Report that the gradients of `names` are not finite, out of `params` parameters. `scale`
        is the loss scale from the next step on."""
        what = "skipped" if skipped else "applied as it is (set skip_nonfinite: true to skip)"
        if scale is not None:
            what += f", and the loss scale is {scale:g} now"
        more = "" if self._said else "; later ones are logged as INFO, and report() counts them"
        level = logging.INFO if self._said else logging.WARNING
        _log.log(level, "%s: step %d is %s%s", _what(names, params), step, what, more)
        self._said = True
        self._names, self._scale = tuple(names), scale
        self.in_a_row = self.in_a_row + 1 if skipped else 0

    def end_row(self) -> None:
        """End the row: a step's gradients were finite, or a checkpoint was loaded."""
        self.in_a_row = 0

    def check(self) -> None:
        """Raise NonfiniteError if too many steps were skipped in a row. For the end of a step."""
        if self.in_a_row < self._max_in_a_row:
            return
        first = self._names[0] if self._names else "the norm of all together"
        scale = fp16 = ""
        if self._scale is not None:
            scale, fp16 = f", with the loss scale down to {self._scale:g}", " use precision: bf16,"
        raise NonfiniteError(
            f"max_skipped_steps: {self.in_a_row} steps in a row were skipped for infinite or NaN "
            f"gradients, first in {first}{scale}; weights and optimizer states are as before "
            "them. Look for NaN in the data and in the loss, go back to a checkpoint with a lower "
            f"learning rate,{fp16} or raise max_skipped_steps",
            skipped_steps=self.in_a_row, parameters=tuple(self._names),
        )  # fmt: skip


def _what(names: Sequence[str], params: int) -> str:
    if not names:
        return "the norm of all gradients together is not finite"
    if len(names) == 1:
        return f"the gradient of {names[0]} is not finite"
    return (
        f"gradients of {len(names)} of {params} parameters are not finite (first {names[0]}, "
        f"last {names[-1]})"
    )
