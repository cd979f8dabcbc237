"""Reports steps with gradients that are not finite, by parameter, and counts them in a row."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from offload.tiers.errors import NonfiniteError

_log = logging.getLogger("offload")


class NonfiniteSteps:
    """The reports of a stepper's non-finite steps. The first one is a warning, later ones are
    information: under fp16 some are normal."""

    def __init__(self, most: int) -> None:
        """`most` is the number of skipped steps in a row before `check` raises."""
        self._most = most
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
        if self.in_a_row < self._most:
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
