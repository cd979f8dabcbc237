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
    total, done, began = max(1, total_nbytes), 0, time.monotonic()
    next_s, is_said = _SILENT_S, False

    def on_bytes(nbytes: int) -> None:
        nonlocal done, next_s, is_said
        done = min(total, done + nbytes)
        seconds = time.monotonic() - began
        if seconds < next_s or done == total:
            return
        next_s, is_said = seconds + _LINE_S, True
        figures = of_budget(done, total)
        share = done / total
        if done and (share >= _ENOUGH or seconds >= _LINE_S):
            figures += f", {about(seconds * (1 / share - 1))}"
        say(f"{what}: {figures}")

    yield on_bytes
    if is_said:
        say(f"{what}: {format_bytes(total)} in {duration(time.monotonic() - began)}")


def say(text: str) -> None:
    """Show a line where progress is shown."""
    if not rank_here() and _log.isEnabledFor(logging.WARNING):
        echo(f"offload: {text}", err=True)
