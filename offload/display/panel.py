"""Loggers that show a run while it trains: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from offload.display.screen import Screen, screen
from offload.display.words import (
    BOLD,
    CYAN,
    DIM,
    GREEN,
    RED,
    YELLOW,
    Cell,
    about,
    filled,
    lines_of,
    of_budget,
    per_second,
    per_step,
    took,
)
from offload.tiers.units import format_bytes

_REFRESH_S = 0.2
_QUIET_S = 30.0  # without a terminal: no longer without a line
_LINES = 20  # about so many per run, if its length is known
_KEPT = 20  # drawings that rates are taken over
_BAR = 8
_MUCH = 0.2  # of the time: waits that stand out
_STANDS_STILL = 0.01  # of the time: a link with work waiting
_WIDEST = 78  # of the bar of steps: the eye finds it at once
# The time left is told from steps after the first two, which learn the order of uses, as soon as
# there are so many of them, or they have taken so long.
_SETTLING, _ENOUGH_STEPS, _ENOUGH_S, _LONG_S = 2, 3, 3.0, 30.0

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

    def wants(self, step: int) -> bool:
        """Whether `log` would show this step if it were called now."""

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
        self._settled_from = 0
        self._first: tuple[int, float] | None = None  # once settled
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
            self._first = None
        if not self._rows:
            self._settled_from = step + _SETTLING
        self.step, self.values = step, values
        self._rows.append((step, values))
        if self._first is None and step >= self._settled_from:
            self._first = step, values["elapsed_seconds"]
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

    def shares(self, name: str) -> dict[str, float]:
        """Shares of the shown steps' time by their seconds in `name` (`waited` or `links`)."""
        seconds = sum(values["seconds"] for _, values in self._rows)
        found: defaultdict[str, float] = defaultdict(float)
        for _, values in self._rows if seconds > 0 else ():
            for key, value in values[name].items():
                found[key] += value / seconds
        return found

    def left(self) -> str:
        """The remaining time, `about 3 min left`; empty if it is not known yet."""
        if self.total is None or self._first is None or self.step == self.total:
            return ""
        steps = self.step - self._first[0]
        seconds = self.values["elapsed_seconds"] - self._first[1]
        if not steps or seconds < (_ENOUGH_S if steps >= _ENOUGH_STEPS else _LONG_S):
            return ""
        return about(seconds / steps * (self.total - self.step))

    # ---------------------------------------------------------------- in words
    def losses(self) -> Iterator[Cell]:
        values = self.values
        if self.loss is not None:
            broken = not math.isfinite(self.loss)
            yield Cell(f"loss {self.loss:.4f}", f"{BOLD};{RED}" if broken else BOLD)
        if values["tokens_per_second"] is not None:
            tokens = values["tokens_per_second"] * values["seconds"]
            yield Cell(f"{tokens / self.step_s:,.0f} tokens/s", BOLD)
        yield Cell(per_step(self.step_s))

    def norms(self) -> Iterator[Cell]:
        values = self.values
        if values["gradient_norm"] is not None:
            yield Cell(f"norm {values['gradient_norm']:.3g}")
        if values["lr"] is not None:
            yield Cell(f"lr {values['lr']:.3g}")
        if values["skipped_steps"]:
            yield Cell(f"{values['skipped_steps']:,} skipped", YELLOW)

    def figures(self) -> Iterator[Cell]:
        for name, value in self.values["figures"].items():
            yield Cell(f"{name} {value:.4g}")

    def links(self) -> Iterator[Cell]:
        for use, share in self.shares("links").items():
            stands_still = use.endswith(" stalled")
            if share >= _STANDS_STILL if stands_still else use.endswith(" busy") and share:
                yield Cell(f"{use} {share:.0%}", YELLOW if stands_still else "")
        moved = self.values["moved"]
        for link, rate in self.rates().items():
            if moved[link]:
                yield Cell(f"{link} {per_second(rate)}")

    def waits(self) -> Iterator[Cell]:
        """Shares of the time from step to step: computing, and each cause for which the model's
        thread waited."""
        shares = self.shares("waited")
        if not shares:
            return
        yield Cell(f"computing {max(0.0, 1 - sum(shares.values())):.0%}", GREEN)
        for name, share in shares.items():
            if share:
                yield Cell(f"{name} {share:.0%}", YELLOW if share >= _MUCH else "")

    def tiers(self) -> Iterator[tuple[str, int, int]]:
        """The name, bytes held and budget of the tiers that hold anything."""
        budgets = self.run.budgets or {}
        for tier, nbytes in self.values["tiers"].items():
            if nbytes or budgets.get(tier):
                yield tier, nbytes, budgets.get(tier, 0)


class Panel:
    """Lines at the bottom of the terminal, redrawn a few times per second by the loop's own
    thread."""

    def __init__(self, run: Run, on: Screen = screen) -> None:
        self._recent = _Recent(run)
        self._screen = on
        self._shown_at = -math.inf
        self._is_open = False
        self._ended = False

    def wants(self, step: int) -> bool:
        due = time.monotonic() - self._shown_at >= _REFRESH_S
        return due or step == self._recent.run.steps

    def log(self, values: Values, step: int) -> None:
        """Draw, unless the last drawing is too recent."""
        if not self.wants(step):
            self._recent.leave_out(values, step)
            return
        self._recent.note(values, step)
        if self._is_open:
            self._screen.draw()
        else:
            self._is_open = True
            self._ended = False
            self._screen.add(self.lines)
        self._shown_at = time.monotonic()

    def close(self) -> None:
        """Leave the last figures on the screen."""
        if self._is_open:
            self._is_open = False
            self._ended = True
            self._recent.note_last()
            self._screen.remove(self.lines)

    def lines(self, columns: int) -> list[str]:
        """The lines of the panel for a terminal of `columns`."""
        recent, coloured = self._recent, self._screen.is_coloured
        rows: list[tuple[str, list[Cell]]] = [
            ("", [*recent.losses(), *recent.norms(), *recent.figures()]),
            ("moving", list(recent.links())),
            ("holding", [_held(*tier) for tier in recent.tiers()]),
            ("time", list(recent.waits())),
        ]
        if not recent.values["tiers"]:
            rows.append(("holding", [Cell(_process(recent.values))]))
        found = [self._steps(columns, coloured=coloured)]
        for label, cells in rows:
            if cells:
                found += lines_of(label, cells, columns, coloured=coloured)
        return found

    def _steps(self, columns: int, *, coloured: bool) -> str:
        recent = self._recent
        total = recent.total
        if total is None:
            so_far = f"for {took(recent.values['elapsed_seconds'])}"
            return next(lines_of("step", [Cell(f"{recent.step:,}", BOLD), Cell(so_far, DIM)],
                                 columns, coloured=coloured))  # fmt: skip
        count = f"{recent.step:,}/{total:,}"
        said = recent.left()
        if self._ended or not said:
            said = f"after {took(recent.values['elapsed_seconds'])}"
        width = min(columns, _WIDEST) - 10 - len(count) - len(said) - 6
        share = recent.step / total
        cells = [Cell(count, BOLD)]
        if width >= _BAR:
            done = round(share * width)
            bar = Cell("━" * done, CYAN).shown(coloured=coloured)
            bar += Cell(("━" if coloured else " ") * (width - done), DIM).shown(coloured=coloured)
            label = Cell("step".ljust(10), DIM).shown(coloured=coloured)
            shown = (cell.shown(coloured=coloured) for cell in cells)
            return f"{label}{''.join(shown)}   {bar}   {said}"
        return next(lines_of("step", [*cells, Cell(said)], columns, coloured=coloured))


class Lines:
    """Prints a line per `every` steps, or twenty per run, and at least one per 30 seconds."""

    def __init__(self, run: Run, say: Callable[[str], None], every: int | None = None) -> None:
        self._recent = _Recent(run)
        self._say = say
        if every is None and run.steps is not None:
            every = max(1, run.steps // _LINES)
        self._every = every
        self._said_at: float | None = None

    def wants(self, step: int) -> bool:
        every, before = self._every, self._said_at
        by_number = step == self._recent.run.steps or (every is not None and step % every == 0)
        return by_number or before is None or time.monotonic() - before >= _QUIET_S

    def log(self, values: Values, step: int) -> None:
        """Print a line if it is due."""
        if not self.wants(step):
            self._recent.leave_out(values, step)
            return
        self._recent.note(values, step)
        self._said_at = time.monotonic()
        self._say(self.line())

    def line(self) -> str:
        recent = self._recent
        total = "" if recent.total is None else f"/{recent.total:,}"
        held = [f"{tier} {format_bytes(nbytes)}" for tier, nbytes, _ in recent.tiers()]
        parts = [
            [f"step {recent.step:,}{total}"],
            _texts(recent.losses()),
            _texts(recent.norms()),
            _texts(recent.figures()),
            held or [_process(recent.values)],
            _texts(recent.links()),
            _texts(recent.waits()),
            [recent.left()] if recent.left() else [],
        ]
        return " | ".join("  ".join(part) for part in parts if part)

    def close(self) -> None:
        """Print the last step, if it was left out."""
        if self._recent.note_last():
            self._say(self.line())


def _texts(cells: Iterator[Cell]) -> list[str]:
    return [cell.text for cell in cells]


def _held(tier: str, used: int, budget: int) -> Cell:
    if not budget:
        return Cell(f"{tier} {format_bytes(used)}")
    return Cell(f"{tier} {filled(used / budget, _BAR)} {of_budget(used, budget)}")


def _process(values: Values) -> str:
    return f"memory of the process {format_bytes(values['rss_nbytes'])}"
