"""Loggers that show a run while it trains: a bar on a terminal, else plain lines."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from offload.runs.loggers import Logger
from offload.tiers.units import format_bytes

_REFRESH_S = 0.2
_PLAIN_LINES = 20


class Display(Logger, Protocol):
    """Shows the state after each step; a context manager around the loop."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


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

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Draw, unless the last drawing is too recent."""
        now = time.monotonic()
        if now - self._shown_at < _REFRESH_S and step < self._steps:
            return
        self._shown_at = now
        self._progress.update(self._task, completed=step, description=_speed(values), refresh=False)
        below = Text(" | ".join(_bytes(values)), style="dim")
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

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Print a line at the first, the last and every so many steps."""
        if step % self._every and step not in (self._first, self._steps):
            return
        parts = [f"step {step}/{self._steps}", _speed(values), *_bytes(values)]
        self._console.print(" | ".join(parts), highlight=False, markup=False, soft_wrap=True)


class LossWarning:
    """Says once that the loss is not finite."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said = False

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Warn at the first such loss."""
        if math.isfinite(values["loss"]) or self._said:
            return
        self._said = True
        self._console.print(
            f"warning: the loss of step {step} is {values['loss']}; lower optimizer.lr, or "
            "set clip_grad_norm (said once)",
            style="yellow",
        )


def _speed(values: Mapping[str, Any]) -> str:
    return f"loss {values['loss']:.3f}  {values['tokens_per_second']:,.0f} tokens/s"


def _bytes(values: Mapping[str, Any]) -> list[str]:
    """Bytes held by tiers and moved over links, if there are any; else the process's memory."""
    tiers, moved = values["tiers"], values["moved"]
    if not tiers:
        return [f"memory of the process {format_bytes(values['rss_nbytes'])}"]
    held = "  ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in tiers.items())
    return [held, f"moved {format_bytes(sum(moved.values()))}"]
