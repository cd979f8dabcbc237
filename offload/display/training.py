"""The figures of steps, as lines."""

import errno
import logging
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from offload.display.words import about, duration, of_budget, per_second
from offload.tiers.units import format_bytes

_log = logging.getLogger("offload")
_QUIET_S = 30.0  # no longer without a line
_LINES = 20  # about so many per run, if its length is known
_KEPT = 20  # lines that rates are taken over
_ENOUGH = 3  # steps shown, for the time left to be told from their median

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """The known facts of a run before its first step. Steps are those of the whole run, including
    those before it was resumed; None is unknown. Budgets are bytes by tier."""

    start: int = 0
    steps: int | None = None
    budgets: Mapping[str, int] | None = None


class Lines:
    """A logger that prints a line per `every` steps, or twenty per run, and at least one per 30
    seconds. Figures that take time are those over the last lines."""

    def __init__(self, run: Run, say: Callable[[str], None], every: int | None = None) -> None:
        if every is None and run.steps is not None:
            every = max(1, run.steps // _LINES)
        self._run, self._say, self._every = run, say, every
        self._rows: deque[tuple[int, Values]] = deque(maxlen=_KEPT)  # that were shown
        self._loss: float | None = None  # the last that was known
        self._said_at: float | None = None
        self._left_out: tuple[Values, int] | None = None  # since the last line

    def log(self, values: Values, step: int) -> None:
        """Print a line if it is due."""
        every, before = self._every, self._said_at
        by_number = step == self._run.steps or (every is not None and step % every == 0)
        if by_number or before is None or time.monotonic() - before >= _QUIET_S:
            self._print(values, step)
        else:
            self._left_out = values, step

    def close(self) -> None:
        """Print the last step, if it was left out."""
        if self._left_out is not None:
            self._print(*self._left_out)

    def _print(self, values: Values, step: int) -> None:
        """Print the line of a step. Where the terminal is closed while the program was to go on,
        training goes on, too."""
        if self._rows and step <= self._rows[-1][0]:  # an earlier checkpoint was loaded
            self._rows.clear()
        self._rows.append((step, values))
        if values["loss"] is not None:
            self._loss = values["loss"]
        self._said_at, self._left_out = time.monotonic(), None
        try:
            self._say(self._line(values, step))
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._say = lambda line: None
            _log.warning("the terminal is gone: no steps are shown any more")

    # ---------------------------------------------------------------- in words
    def _line(self, values: Values, step: int) -> str:
        steps = self._run.steps
        total = None if steps is None or step > steps else steps  # wrong, if it is exceeded
        said = [f"step {step:,}" + ("" if total is None else f"/{total:,}")]
        parts = (self._figures(values), self._links(), self._tiers(values), self._waits())
        said += ["  ".join(part) for part in parts]
        if total is not None and step < total and len(self._rows) >= _ENOUGH:
            usual_s = statistics.median(row["seconds"] for _, row in self._rows)
            said.append(about(usual_s * (total - step)))
        return " | ".join(filter(None, said))

    def _figures(self, values: Values) -> Iterator[str]:
        """The figures of the step; its seconds are those from step to step, with what is between
        steps."""
        (first, before), (last, now) = self._rows[0], self._rows[-1]
        step_s = float(now["seconds"])
        if first != last:
            step_s = float(now["elapsed_seconds"] - before["elapsed_seconds"]) / (last - first)
        if self._loss is not None:
            yield f"loss {self._loss:.4f}"
        if values["tokens_per_second"] is not None:
            tokens = values["tokens_per_second"] * values["seconds"]
            yield f"{tokens / step_s:,.0f} tokens/s"
        yield f"{duration(step_s)}/step"
        if values["gradient_norm"] is not None:
            yield f"norm {values['gradient_norm']:.3g}"
        if values["lr"] is not None:
            yield f"lr {values['lr']:.3g}"
        if values["skipped_steps"]:
            yield f"{values['skipped_steps']:,} skipped"
        for name, value in values["figures"].items():
            yield f"{name} {value:.4g}"

    def _links(self) -> Iterator[str]:
        """Bytes per second by link."""
        before, now = self._rows[0][1], self._rows[-1][1]
        seconds = now["elapsed_seconds"] - before["elapsed_seconds"]
        if seconds <= 0:  # of one step alone nothing is known
            return
        for link, nbytes in now["moved"].items():
            if nbytes:
                yield f"{link} {per_second((nbytes - before['moved'].get(link, 0)) / seconds)}"

    def _tiers(self, values: Values) -> Iterator[str]:
        """The bytes held by each tier that holds anything, or those of the process."""
        held, budgets = values["tiers"], self._run.budgets or {}
        for tier, nbytes in held.items():
            if budget := budgets.get(tier):
                yield f"{tier} {of_budget(nbytes, budget)}"
            elif nbytes:
                yield f"{tier} {format_bytes(nbytes)}"
        if not held:
            yield f"memory of the process {format_bytes(values['rss_nbytes'])}"

    def _waits(self) -> Iterator[str]:
        """Shares of the time from step to step: computing, and each cause for which the model's
        thread waited."""
        seconds = sum(values["seconds"] for _, values in self._rows)
        shares: defaultdict[str, float] = defaultdict(float)
        for _, values in self._rows if seconds > 0 else ():
            for key, value in values["waited"].items():
                shares[key] += value / seconds
        if not shares:
            return
        yield f"computing {max(0.0, 1 - sum(shares.values())):.0%}"
        for name, share in shares.items():
            if share:
                yield f"{name} {share:.0%}"
