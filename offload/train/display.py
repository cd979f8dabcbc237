"""What a run shows while it trains: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from offload.runs.metrics import StepMetrics
from offload.tiers.units import format_bytes

_REFRESH_S = 0.2
_PLAIN_LINES = 20


class Display(Protocol):
    """Shown once per step; a context manager around the loop."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def show(self, metrics: StepMetrics) -> None:
        """Show the state after a step."""


def make_display(console: Console, start: int, steps: int) -> Display:
    """The display that suits `console`."""
    kind = BarDisplay if console.is_terminal else LineDisplay
    return kind(console, start, steps)


class BarDisplay:
    """A progress bar and a line of bytes below it, refreshed a few times per second."""

    def __init__(self, console: Console, start: int, steps: int) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=steps, completed=start)
        # refreshed by the loop: no thread beside the arithmetic
        self._live = Live(console=console, auto_refresh=False)
        self._steps = steps
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self, metrics: StepMetrics) -> None:
        """Draw, unless the last drawing is too recent."""
        now = time.monotonic()
        if now - self._shown_at < _REFRESH_S and metrics.step < self._steps:
            return
        self._shown_at = now
        self._progress.update(
            self._task, completed=metrics.step, description=_speed(metrics), refresh=False
        )
        below = Text(f"{_tiers(metrics)} | {_moved(metrics)}", style="dim")
        self._live.update(Group(self._progress.get_renderable(), below), refresh=True)


class LineDisplay:
    """About twenty lines per run."""

    def __init__(self, console: Console, start: int, steps: int) -> None:
        self._console = console
        self._first = start + 1
        self._steps = steps
        self._every = max(1, steps // _PLAIN_LINES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def show(self, metrics: StepMetrics) -> None:
        """Print a line at the first, the last and every so many steps."""
        if metrics.step % self._every and metrics.step not in (self._first, self._steps):
            return
        parts = [
            f"step {metrics.step}/{self._steps}", _speed(metrics), _tiers(metrics), _moved(metrics)
        ]  # fmt: skip
        self._console.print(" | ".join(parts), highlight=False, markup=False, soft_wrap=True)


def _speed(metrics: StepMetrics) -> str:
    return f"loss {metrics.loss:.3f}  {metrics.tokens_per_second:,.0f} tokens/s"


def _tiers(metrics: StepMetrics) -> str:
    return "  ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in metrics.tiers.items())


def _moved(metrics: StepMetrics) -> str:
    return f"moved {format_bytes(sum(metrics.moved.values()))}"
