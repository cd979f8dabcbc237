"""The bottom of the terminal, where panels and progress bars are redrawn while text scrolls past.

The cursor waits at the top of the drawing:

    ...                         text that was printed
    ▮                           the cursor; an empty line
    step 12/200 ━━━━━━━━        the drawing

Text printed meanwhile passes through `sys.stdout` and `sys.stderr`, which are replaced: the drawing
is erased first and comes back below. So does the text of log handlers that had these streams. Text
that takes another way (of a child process, of C) lands at the cursor, and the next drawing begins
below it. No terminal mode is changed, so nothing has to be restored if the process is killed.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

_log = logging.getLogger("offload")
# The lines of one part of the drawing, for a terminal so many columns wide.
Part = Callable[[int], list[str]]

_NARROWEST = 20
_SAMPLE = "━█░…"  # what drawings are made of
_ERASE = "\x1b[J"  # from the cursor to the end of the screen


class Screen:
    """Draws its parts, one below the other. Thread-safe."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._lock = threading.RLock()
        self._drawn = ""
        self._is_drawn = self._is_gone = False
        self._terminal: TextIO = sys.stdout
        self._replaced: dict[str, TextIO] = {}
        self._unfinished = ""  # of what was printed, the line that has no end yet

    @property
    def is_there(self) -> bool:
        """Whether standard output is a terminal that can be drawn on."""
        if self._replaced:
            return True
        out = sys.stdout
        if (
            self._is_gone
            or not _is_terminal(out)
            or os.environ.get("TERM", "dumb") in ("dumb", "unknown")
        ):
            return False
        try:
            _SAMPLE.encode(out.encoding or "ascii")
        except UnicodeEncodeError:
            return False
        return True

    @property
    def is_coloured(self) -> bool:
        return not os.environ.get("NO_COLOR")

    # ---------------------------------------------------------------- parts
    def add(self, part: Part) -> None:
        """Draw `part` below the others, until it is removed."""
        with self._lock:
            if not self._parts:
                self._begin()
            self._parts.append(part)
        self.draw()

    def remove(self, part: Part, *, keep: bool = True) -> None:
        """Stop drawing the part. With `keep`, its lines stay as they are and scroll away."""
        with self._lock:
            if part not in self._parts:
                return
            kept = "".join(f"{line}\n" for line in part(self._size()[0])) if keep else ""
            self._put(self._erased() + (self._ended_line() + kept if keep else ""))
            if part in self._parts:
                self._parts.remove(part)
            if self._parts:
                self.draw()
            else:
                self._end()

    def draw(self) -> None:
        """Request the lines of all parts, and draw them."""
        with self._lock:
            if not self._parts:
                return
            columns, rows = self._size()
            lines = [line for part in self._parts for line in part(columns)][: rows - 2]
            self._drawn = "".join(f"\n{line}" for line in lines) + f"\x1b[{len(lines)}A\r"
            self._redraw(self._erased() + self._ended_line())

    def _size(self) -> tuple[int, int]:
        """The columns and rows available for drawing."""
        try:
            columns, rows = os.get_terminal_size(self._terminal.fileno())
        except OSError:
            columns = rows = 0
        # a full line would wrap in some terminals
        return max(_NARROWEST, (columns or 80) - 1), max(3, rows or 24)

    def _ended_line(self) -> str:
        """The text that ends an unfinished line, or replaces one that overwrites itself (`\\r`,
        another progress bar)."""
        unfinished, self._unfinished = self._unfinished, ""
        if not unfinished:
            return ""
        return f"\r{_ERASE}" if "\r" in unfinished else "\n"

    def _redraw(self, before: str = "") -> None:
        self._is_drawn = True
        self._put(before + self._drawn)

    def _erased(self) -> str:
        is_drawn, self._is_drawn = self._is_drawn, False
        return _ERASE if is_drawn else ""

    def _put(self, text: str) -> None:
        try:
            self._terminal.write(text)
            self._terminal.flush()
        except OSError as error:  # closed, while the program was to go on: so does training
            self._parts.clear()
            self._is_drawn = False
            self._is_gone = True
            self._end()
            _log.warning("standard output is gone (%s): nothing is shown any more", error.strerror)

    def forget_parent(self) -> None:
        """Stop drawing in a forked child."""
        self._lock = threading.RLock()
        self._parts.clear()
        self._is_drawn = False
        self._end()

    # ---------------------------------------------------------------- what others print
    def _begin(self) -> None:
        self._terminal = _behind(sys.stdout)
        for name in ("stdout", "stderr"):
            stream = _behind(getattr(sys, name))
            if _is_terminal(stream):
                self._replaced[name] = stream
                setattr(sys, name, _Passing(self, stream))
        ours = {id(stream): getattr(sys, name) for name, stream in self._replaced.items()}
        for handler in _stream_handlers():
            if id(handler.stream) in ours:
                handler.setStream(ours[id(handler.stream)])

    def _end(self) -> None:
        for name, stream in self._replaced.items():
            if isinstance(getattr(sys, name), _Passing):  # else it has been replaced since
                setattr(sys, name, stream)
        self._replaced.clear()
        for handler in _stream_handlers():
            if isinstance(handler.stream, _Passing):
                handler.setStream(handler.stream.stream)

    def passing(self, stream: TextIO, text: str) -> int:
        """Write printed text above the drawing."""
        with self._lock:
            if not self._parts:
                return stream.write(text)
            self._put(self._erased())
            written = stream.write(text)
            stream.flush()
            _, newline, rest = text.rpartition("\n")
            self._unfinished = rest if newline else (self._unfinished + rest)[-_KEPT:]
            if not self._unfinished:
                self._redraw()
            return written


_KEPT = 1 << 10  # characters: a line that never ends takes no more memory


def _behind(stream: Any) -> Any:
    """Return the original stream; another display may have restored an ended replacement."""
    while isinstance(stream, _Passing):
        stream = stream.stream
    return stream


class _Passing:
    """A replacement for `sys.stdout` or `sys.stderr`."""

    def __init__(self, screen: Screen, stream: TextIO) -> None:
        self._screen = screen
        self.stream = stream

    def write(self, text: str) -> int:
        return self._screen.passing(self.stream, text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


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
