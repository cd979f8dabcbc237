"""The figures of steps, as lines."""

from __future__ import annotations

import errno
import logging
import math
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


class LossWarning:
    """A logger that warns once that the loss is not finite."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said = False

    def log(self, values: Values, step: int) -> None:
        """Warn at the first loss that is not finite."""
        loss = values["loss"]
        if loss is None or math.isfinite(loss) or self._said:
            return
        self._said = True
        self._say(
            f"the loss of step {step} is {loss}; lower optimizer.lr, or set clip_grad_norm "
            "(said once)"
        )


class _Recent:
    """The run's figures over the last steps shown, and its speed."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.step = run.start
        self.values: Values = {}
        self.loss: float | None = None  # the last that was known
        self._rows: deque[tuple[int, Values]] = deque(maxlen=_KEPT)

    def note(self, values: Values, step: int) -> None:
        if self._rows and step <= self._rows[-1][0]:  # an earlier checkpoint was loaded
            self._rows.clear()
        self.step, self.values = step, values
        self._rows.append((step, values))
        if values["loss"] is not None:
            self.loss = values["loss"]

    @property
    def total(self) -> int | None:
        """The steps of the whole run; None if they are unknown or wrong."""
        steps = self.run.steps
        return None if steps is None or self.step > steps else steps

    @property
    def step_s(self) -> float:
        """Seconds from step to step, including the time between steps."""
        (first, before), (last, now) = self._rows[0], self._rows[-1]
        if first == last:
            return float(now["seconds"])
        return float(now["elapsed_seconds"] - before["elapsed_seconds"]) / (last - first)

    def rates(self) -> dict[str, float]:
        """Bytes per second by link."""
        before, now = self._rows[0][1], self._rows[-1][1]
        seconds = now["elapsed_seconds"] - before["elapsed_seconds"]
        if seconds <= 0:  # of one step alone nothing is known
            return {}
        since = before["moved"]
        return {key: (value - since.get(key, 0)) / seconds for key, value in now["moved"].items()}

    def waits(self) -> dict[str, float]:
        """Shares of the shown steps' time that the model's thread waited, by cause."""
        seconds = sum(values["seconds"] for _, values in self._rows)
        shares: defaultdict[str, float] = defaultdict(float)
        for _, values in self._rows if seconds > 0 else ():
            for key, value in values["waited"].items():
                shares[key] += value / seconds
        return shares

    def left(self) -> str:
        """The remaining time, `about 3 min left`; empty if it is not known yet."""
        if self.total is None or self.step == self.total or len(self._rows) < _ENOUGH:
            return ""
        usual_s = statistics.median(values["seconds"] for _, values in self._rows)
        return about(usual_s * (self.total - self.step))

    # ---------------------------------------------------------------- in words
    def rows(self) -> list[list[str]]:
        """The figures of the step in words: of the step itself, links, tiers and waits."""
        rows = (self._figures(), self._links(), self._tiers(), self._waits())
        return [texts for figures in rows if (texts := list(figures))]

    def _figures(self) -> Iterator[str]:
        values = self.values
        if self.loss is not None:
            yield f"loss {self.loss:.4f}"
        if values["tokens_per_second"] is not None:
            tokens = values["tokens_per_second"] * values["seconds"]
            yield f"{tokens / self.step_s:,.0f} tokens/s"
        yield f"{duration(self.step_s)}/step"
        if values["gradient_norm"] is not None:
            yield f"norm {values['gradient_norm']:.3g}"
        if values["lr"] is not None:
            yield f"lr {values['lr']:.3g}"
        if values["skipped_steps"]:
            yield f"{values['skipped_steps']:,} skipped"
        for name, value in values["figures"].items():
            yield f"{name} {value:.4g}"

    def _links(self) -> Iterator[str]:
        moved = self.values["moved"]
        for link, rate in self.rates().items():
            if moved[link]:
                yield f"{link} {per_second(rate)}"

    def _tiers(self) -> Iterator[str]:
        """The bytes held by each tier that holds anything, or those of the process."""
        held, budgets = self.values["tiers"], self.run.budgets or {}
        for tier, nbytes in held.items():
            if budget := budgets.get(tier):
                yield f"{tier} {of_budget(nbytes, budget)}"
            elif nbytes:
                yield f"{tier} {format_bytes(nbytes)}"
        if not held:
            yield f"memory of the process {format_bytes(self.values['rss_nbytes'])}"

    def _waits(self) -> Iterator[str]:
        """Shares of the time from step to step: computing, and each cause for which the model's
        thread waited."""
        shares = self.waits()
        if not shares:
            return
        yield f"computing {max(0.0, 1 - sum(shares.values())):.0%}"
        for name, share in shares.items():
            if share:
                yield f"{name} {share:.0%}"


class Lines:
    """A logger that prints a line per `every` steps, or twenty per run, and at least one per 30
    seconds."""

    def __init__(self, run: Run, say: Callable[[str], None], every: int | None = None) -> None:
        self._recent = _Recent(run)
        self._say = say
        if every is None and run.steps is not None:
            every = max(1, run.steps // _LINES)
        self._every = every
        self._said_at: float | None = None
        self._left_out: tuple[Values, int] | None = None  # since the last line

    def _is_due(self, step: int) -> bool:
        every, before = self._every, self._said_at
        by_number = step == self._recent.run.steps or (every is not None and step % every == 0)
        return by_number or before is None or time.monotonic() - before >= _QUIET_S

    def log(self, values: Values, step: int) -> None:
        """Print a line if it is due."""
        if self._is_due(step):
            self._print(values, step)
        else:
            self._left_out = values, step

    def _print(self, values: Values, step: int) -> None:
        """Print the line of a step. Where the terminal is closed while the program was to go on,
        training goes on, too."""
        self._recent.note(values, step)
        self._said_at, self._left_out = time.monotonic(), None
        try:
            self._say(self.line())
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._say = lambda line: None
            _log.warning("the terminal is gone: no steps are shown any more")

    def line(self) -> str:
        recent = self._recent
        total = "" if recent.total is None else f"/{recent.total:,}"
        rows = ["  ".join(texts) for texts in recent.rows()]
        return " | ".join(filter(None, [f"step {recent.step:,}{total}", *rows, recent.left()]))

    def close(self) -> None:
        """Print the last step, if it was left out."""
        if self._left_out is not None:
            self._print(*self._left_out)
