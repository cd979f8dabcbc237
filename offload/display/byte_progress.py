"""The progress of long operations: a bar on a terminal, lines elsewhere.

    with progress("loading weights", total_nbytes) as came:
        for group in groups:
            ...
            came(group.nbytes)

Nothing is shown of what is done within two seconds, on ranks but the first, or where warnings of
the logger "offload.progress" are off (as they are where those of "offload" are):

    logging.getLogger("offload.progress").setLevel(logging.ERROR)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from offload.display.plain_text import echo
from offload.display.screen import Screen, screen
from offload.display.words import about, of_budget, took
from offload.process.machine import rank_here
from offload.tiers.units import format_bytes

_log = logging.getLogger("offload.progress")
_SILENT_S = 2.0
_REFRESH_S = 0.2
_LINE_S = 10.0
_BAR = 30  # columns
_ENOUGH = 0.05  # done, for the rest to be told from it


@contextmanager
def progress(what: str, total_nbytes: int) -> Iterator[Callable[[int], None]]:
    """Show progress inside; `came(nbytes)` reports further bytes that are done."""
    if rank_here() or not _log.isEnabledFor(logging.WARNING):
        yield lambda nbytes: None
        return
    shown = _Progress(what, total_nbytes)
    try:
        yield shown.came
    except BaseException:
        shown.end(finished=False)
        raise
    shown.end(finished=True)


class _Progress:
    def __init__(self, what: str, total: int, on: Screen = screen) -> None:
        self._what = what
        self._total = max(1, total)
        self._screen = on
        self._done = 0
        self._began = time.monotonic()
        self._next_s = _SILENT_S
        self._is_drawn = self._is_said = False

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def came(self, nbytes: int) -> None:
        self._done = min(self._total, self._done + nbytes)
        seconds = self._seconds
        if seconds < self._next_s or self._done == self._total:
            return
        if self._screen.is_there:
            self._next_s = seconds + _REFRESH_S
            if self._is_drawn:
                self._screen.draw()
            else:
                self._is_drawn = True
                self._screen.add(self._bar)
        else:
            self._next_s = seconds + _LINE_S
            self._is_said = True
            _say(", ".join(filter(None, [f"{self._what}: {self._figures()}", self._left()])))

    def end(self, *, finished: bool) -> None:
        if self._is_drawn:
            self._screen.remove(self._bar, keep=False)
        if finished and (self._is_drawn or self._is_said):
            _say(f"{self._what}: {format_bytes(self._total)} in {took(self._seconds)}")

    def _bar(self) -> RenderableType:
        grid = Table.grid(padding=(0, 3, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(max_width=_BAR)
        bar = ProgressBar(total=self._total, completed=self._done)
        grid.add_row(Text(self._what), bar, self._figures(), self._left())
        return grid

    @property
    def _share(self) -> float:
        return self._done / self._total

    def _figures(self) -> str:
        return of_budget(self._done, self._total)

    def _left(self) -> str:
        """The remaining time; empty as long as little is done in little time."""
        if not self._done or (self._share < _ENOUGH and self._seconds < _LINE_S):
            return ""
        return about(self._seconds * (1 / self._share - 1))


def _say(text: str) -> None:
    echo(f"offload: {text}", err=True)
