"""The progress of long operations, as a line every ten seconds.

    with progress("loading weights", total_nbytes) as on_bytes:
        for group in groups:
            ...
            on_bytes(group.nbytes)

Nothing is shown of what is done within two seconds, on ranks but the first, or where warnings of
the logger "offload.progress" are off (as they are where those of "offload" are):

    logging.getLogger("offload.progress").setLevel(logging.ERROR)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offload.display.plain_text import echo
from offload.display.words import about, duration, of_budget
from offload.process.machine import rank_here
from offload.tiers.units import format_bytes

_log = logging.getLogger("offload.progress")
_SILENT_S = 2.0
_LINE_S = 10.0
_ENOUGH = 0.05  # done, for the rest to be told from it


@contextmanager
def progress(what: str, total_nbytes: int) -> Iterator[Callable[[int], None]]:
    """Show progress inside; `on_bytes(nbytes)` reports further bytes that are done."""
    if rank_here() or not _log.isEnabledFor(logging.WARNING):
        yield lambda nbytes: None
        return
    shown = _Progress(what, total_nbytes)
    yield shown.on_bytes
    shown.end()


def say(text: str) -> None:
    """Show a line where progress is shown."""
    if not rank_here() and _log.isEnabledFor(logging.WARNING):
        echo(f"offload: {text}", err=True)


class _Progress:
    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = max(1, total)
        self._done = 0
        self._began = time.monotonic()
        self._next_s = _SILENT_S
        self._is_said = False

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def on_bytes(self, nbytes: int) -> None:
        self._done = min(self._total, self._done + nbytes)
        seconds = self._seconds
        if seconds < self._next_s or self._done == self._total:
            return
        self._next_s = seconds + _LINE_S
        self._is_said = True
        figures = of_budget(self._done, self._total)
        self._say(", ".join(filter(None, [figures, self._left()])))

    def end(self) -> None:
        if self._is_said:
            self._say(f"{format_bytes(self._total)} in {duration(self._seconds)}")

    def _left(self) -> str:
        """The remaining time; empty as long as little is done in little time."""
        share, seconds = self._done / self._total, self._seconds
        if not self._done or (share < _ENOUGH and seconds < _LINE_S):
            return ""
        return about(seconds * (1 / share - 1))

    def _say(self, text: str) -> None:
        say(f"{self._what}: {text}")
