"""The bottom of the terminal, where panels and progress bars are redrawn while text scrolls past.

`rich.live` draws. Text printed meanwhile through `sys.stdout` and `sys.stderr` is shown above the
drawing, also that of log handlers made before. No thread draws, and no terminal mode is changed, so
nothing has to be restored if the process is killed.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live

_log = logging.getLogger("offload")
Part = Callable[[], RenderableType]
_SAMPLE = "━█░…"  # what drawings are made of


class Screen:
    """Draws its parts, one below the other. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._parts: list[Part] = []
        self._live: Live | None = None
        self._replaced: dict[str, TextIO] = {}
        self._is_gone = False

    @property
    def is_there(self) -> bool:
        """Whether standard output is a terminal that can be drawn on."""
        if self._live is not None:
            return True
        out = sys.stdout
        if self._is_gone or not _is_terminal(out):
            return False
        try:
            _SAMPLE.encode(out.encoding or "ascii")
        except UnicodeEncodeError:
            return False
        return os.environ.get("TERM", "dumb") not in ("dumb", "unknown")

    def add(self, part: Part) -> None:
        """Draw `part` below the others, until it is removed."""
        with self._lock:
            self._parts.append(part)
            if self._live is None:
                self._guarded(self._begin)
            self.draw()

    def remove(self, part: Part, *, keep: bool = True) -> None:
        """Stop drawing the part. With `keep`, it stays as it is and scrolls away."""
        with self._lock:
            live = self._live
            if live is None or part not in self._parts:
                return
            self._parts.remove(part)
            if keep:
                self._guarded(lambda: live.console.print(part()))
            if self._parts:
                self.draw()
            elif self._live is not None:
                self._guarded(live.stop)
                self._end()

    def draw(self) -> None:
        """Draw all parts as they are now."""
        with self._lock:
            live = self._live
            if live is not None:
                parts = Group(*(part() for part in self._parts))
                self._guarded(lambda: live.update(parts, refresh=True))

    def _guarded(self, write: Callable[[], None]) -> None:
        """Write to the terminal. Where it is closed while the program was to go on, so does
        training."""
        try:
            write()
        except OSError as error:
            self._parts.clear()
            self._is_gone = True
            self._end()
            _log.warning("standard output is gone (%s): nothing is shown any more", error.strerror)

    def _begin(self) -> None:
        console = Console(file=_behind(sys.stdout), highlight=False, markup=False, emoji=False)
        self._live = Live(
            console=console, auto_refresh=False, transient=True, vertical_overflow="crop",
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        for name in ("stdout", "stderr"):
            stream = _behind(getattr(sys, name))
            if _is_terminal(stream):
                self._replaced[name] = stream
                setattr(sys, name, FileProxy(console, stream))
        ours = {id(stream): getattr(sys, name) for name, stream in self._replaced.items()}
        for handler in _stream_handlers():
            if id(handler.stream) in ours:
                handler.setStream(ours[id(handler.stream)])
        self._live.start()
        console.show_cursor(True)  # a killed process leaves it as it is

    def _end(self) -> None:
        """Give the streams back."""
        self._live = None
        for name, stream in self._replaced.items():
            if isinstance(getattr(sys, name), FileProxy):  # else it has been replaced since
                setattr(sys, name, stream)
        self._replaced.clear()
        for handler in _stream_handlers():
            handler.setStream(_behind(handler.stream))

    def forget_parent(self) -> None:
        """Stop drawing in a forked child."""
        self._lock = threading.RLock()
        self._parts.clear()
        self._end()


def _behind(stream: Any) -> Any:
    """Return the original stream; another display may have restored an ended replacement."""
    while isinstance(stream, FileProxy):
        stream = stream.rich_proxied_file
    return stream


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    """The stream handlers of all loggers."""
    for logger in (logging.root, *logging.Logger.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler):
                yield handler


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # None (no console), or closed
        return False


screen = Screen()  # a process has one terminal
os.register_at_fork(after_in_child=screen.forget_parent)
