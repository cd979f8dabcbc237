"""Loggers that show a run while it trains: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from offload.display.screen import Screen, screen
from offload.display.words import about, of_budget, per_second, per_step, took
from offload.tiers.units import format_bytes

_REFRESH_S = 0.2
_QUIET_S = 30.0  # without a terminal: no longer without a line
_LINES = 20  # about so many per run, if its length is known
_KEPT = 20  # drawings that rates are taken over
_BAR, _LABEL = 8, 10  # columns
_MUCH = 0.2  # of the time: waits that stand out
_STEPS_BAR = 44  # columns
_ENOUGH = 3  # steps shown, for the time left to be told from their median

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """The known facts of a run before its first step. Steps are those of the whole run, including
    those before it was resumed; None is unknown. Budgets are bytes by tier."""

    start: int = 0
    steps: int | None = None
    budgets: Mapping[str, int] | None = None


class Display(Protocol):
    """A logger that shows the figures of steps (see `offload.loggers.Logger`)."""

    def log(self, values: Values, step: int) -> None: ...

    def close(self) -> None:
        """End the display after the last step."""


def make_display(
    run: Run, say: Callable[[str], None], every: int | None = None, *, on_terminal: bool = True
) -> Display:
    """Return the display that suits standard output. Where that is no terminal (or is not to be
    used as one), `say` prints a line after every `every` steps."""
    return Panel(run) if on_terminal and screen.is_there else Lines(run, say, every)


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
        self._last: tuple[Values, int] | None = None  # not noted yet

    def leave_out(self, values: Values, step: int) -> None:
        """Remember a step that is not shown, in case it turns out to be the last one."""
        self._last = values, step

    def note_last(self) -> bool:
        """Note the last step if it was left out, and return whether it was."""
        last, self._last = self._last, None
        if last is not None:
            self.note(*last)
        return last is not None

    def note(self, values: Values, step: int) -> None:
        self._last = None
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
        found: defaultdict[str, float] = defaultdict(float)
        for _, values in self._rows if seconds > 0 else ():
            for key, value in values["waited"].items():
                found[key] += value / seconds
        return found

    def left(self) -> str:
        """The remaining time, `about 3 min left`; empty if it is not known yet."""
        if self.total is None or self.step == self.total or len(self._rows) < _ENOUGH:
            return ""
        usual_s = statistics.median(values["seconds"] for _, values in self._rows)
        return about(usual_s * (self.total - self.step))

    # ---------------------------------------------------------------- in words
    def rows(self, *, bars: bool) -> list[tuple[str, list[Text]]]:
        """The figures of the step in words, each row with its label; with `bars` for budgets."""
        rows = {
            "": self._figures(), "moving": self._links(), "holding": self._tiers(bars=bars),
            "time": self._waits(),
        }  # fmt: skip
        return [(label, cells) for label, found in rows.items() if (cells := list(found))]

    def _figures(self) -> Iterator[Text]:
        values = self.values
        if self.loss is not None:
            yield Text(f"loss {self.loss:.4f}", "bold" if math.isfinite(self.loss) else "bold red")
        if values["tokens_per_second"] is not None:
            tokens = values["tokens_per_second"] * values["seconds"]
            yield Text(f"{tokens / self.step_s:,.0f} tokens/s", "bold")
        yield Text(per_step(self.step_s))
        if values["gradient_norm"] is not None:
            yield Text(f"norm {values['gradient_norm']:.3g}")
        if values["lr"] is not None:
            yield Text(f"lr {values['lr']:.3g}")
        if values["skipped_steps"]:
            yield Text(f"{values['skipped_steps']:,} skipped", "yellow")
        for name, value in values["figures"].items():
            yield Text(f"{name} {value:.4g}")

    def _links(self) -> Iterator[Text]:
        moved = self.values["moved"]
        for link, rate in self.rates().items():
            if moved[link]:
                yield Text(f"{link} {per_second(rate)}")

    def _waits(self) -> Iterator[Text]:
        """Shares of the time from step to step: computing, and each cause for which the model's
        thread waited."""
        shares = self.waits()
        if not shares:
            return
        yield Text(f"computing {max(0.0, 1 - sum(shares.values())):.0%}", "green")
        for name, share in shares.items():
            if share:
                yield Text(f"{name} {share:.0%}", "yellow" if share >= _MUCH else "")

    def _tiers(self, *, bars: bool) -> Iterator[Text]:
        """The bytes held by each tier that holds anything, or those of the process."""
        held, budgets = self.values["tiers"], self.run.budgets or {}
        for tier, nbytes in held.items():
            if budget := budgets.get(tier):
                full = min(_BAR, round(nbytes / budget * _BAR))
                bar = f"{'█' * full}{'░' * (_BAR - full)} " if bars else ""
                yield Text(f"{tier} {bar}{of_budget(nbytes, budget)}")
            elif nbytes:
                yield Text(f"{tier} {format_bytes(nbytes)}")
        if not held:
            yield Text(f"memory of the process {format_bytes(self.values['rss_nbytes'])}")


class Panel:
    """Lines at the bottom of the terminal, redrawn a few times per second by the loop's own
    thread."""

    def __init__(self, run: Run, on: Screen = screen) -> None:
        self._recent = _Recent(run)
        self._screen = on
        self._shown_at = -math.inf
        self._is_open = False
        self._ended = False

    def _is_due(self, step: int) -> bool:
        due = time.monotonic() - self._shown_at >= _REFRESH_S
        return due or step == self._recent.run.steps

    def log(self, values: Values, step: int) -> None:
        """Draw, unless the last drawing is too recent."""
        if not self._is_due(step):
            self._recent.leave_out(values, step)
            return
        self._recent.note(values, step)
        if self._is_open:
            self._screen.draw()
        else:
            self._is_open = True
            self._ended = False
            self._screen.add(self.drawing)
        self._shown_at = time.monotonic()

    def close(self) -> None:
        """Leave the last figures on the screen."""
        if self._is_open:
            self._is_open = False
            self._ended = True
            self._recent.note_last()
            self._screen.remove(self.drawing)

    def drawing(self) -> RenderableType:
        """The panel as it is now."""
        grid = Table.grid()
        grid.add_column(width=_LABEL, style="dim")
        for label, cells in self._recent.rows(bars=True):
            grid.add_row(label, Text("   ").join(cells))
        return Group(self._steps(), grid)

    def _steps(self) -> RenderableType:
        recent = self._recent
        left, total = recent.left(), recent.total
        elapsed = took(recent.values["elapsed_seconds"])
        grid = Table.grid(padding=(0, 3, 0, 0))
        grid.add_column(width=_LABEL - 3, style="dim")
        grid.add_column(style="bold")
        if total is None:
            grid.add_row("step", f"{recent.step:,}", f"for {elapsed}")
            return grid
        grid.add_column(max_width=_STEPS_BAR)
        said = f"after {elapsed}" if self._ended or not left else left
        bar = ProgressBar(total=total, completed=recent.step)
        grid.add_row("step", f"{recent.step:,}/{total:,}", bar, said)
        return grid


class Lines:
    """Prints a line per `every` steps, or twenty per run, and at least one per 30 seconds."""

    def __init__(self, run: Run, say: Callable[[str], None], every: int | None = None) -> None:
        self._recent = _Recent(run)
        self._say = say
        if every is None and run.steps is not None:
            every = max(1, run.steps // _LINES)
        self._every = every
        self._said_at: float | None = None

    def _is_due(self, step: int) -> bool:
        every, before = self._every, self._said_at
        by_number = step == self._recent.run.steps or (every is not None and step % every == 0)
        return by_number or before is None or time.monotonic() - before >= _QUIET_S

    def log(self, values: Values, step: int) -> None:
        """Print a line if it is due."""
        if not self._is_due(step):
            self._recent.leave_out(values, step)
            return
        self._recent.note(values, step)
        self._said_at = time.monotonic()
        self._say(self.line())

    def line(self) -> str:
        recent = self._recent
        total = "" if recent.total is None else f"/{recent.total:,}"
        rows = ["  ".join(cell.plain for cell in cells) for _, cells in recent.rows(bars=False)]
        return " | ".join(filter(None, [f"step {recent.step:,}{total}", *rows, recent.left()]))

    def close(self) -> None:
        """Print the last step, if it was left out."""
        if self._recent.note_last():
            self._say(self.line())
