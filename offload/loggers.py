"""Loggers, which receive the figures of every step of a run.

    engine.watch(loggers=[JSONLinesLogger("run.jsonl"), print_it])
    def print_it(values, step): ...

A logger is anything with a method `log(values, step)`, or that can be called so. `values` are those
of a `StepMetrics` (`offload/runs/metrics.py`) by name; unknown ones are None. `close()` is
called at the end, if there is one.
"""

import asyncio
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast

import aiofiles

from offload.config.paths import StrPath, path_of
from offload.swap.threads.shield import interrupted_in_waits
from offload.swap.threads.transfer import Transfer
from offload.swap.threads.worker import in_thread
from offload.tiers.errors import ConfigError, PathError

Values = Mapping[str, Any]


class Logger(Protocol):
    """Receives every step's figures, in order, on the thread that trains."""

    def log(self, values: Values, step: int) -> None:
        """Log the `values` of a `StepMetrics`, by name: numbers, None if unknown, and bytes by tier
        and by link. They must not be changed."""


AnyLogger = Logger | Callable[[dict[str, Any], int], Any]


def loggers_of(given: Any) -> list[Logger]:
    """Return each of a list of objects as a `Logger`. Raises ConfigError for any other object."""
    if callable(given) or hasattr(given, "log") or isinstance(given, str):
        raise ConfigError(f"loggers: {given!r} is not a list; put it into one")
    return [_logger(each) for each in given]


def _logger(given: Any) -> Logger:
    if isinstance(given, type):
        raise ConfigError(f"loggers: {given.__name__} is a class; make one of it")
    if callable(getattr(given, "log", None)):
        return given  # type: ignore[no-any-return]
    if callable(given):
        return cast(Logger, SimpleNamespace(log=lambda values, step: given(dict(values), step)))
    raise ConfigError(
        f"loggers: a {type(given).__name__} has no method log(values, step) and cannot be called so"
    )


@contextmanager
def closing_all(loggers: Iterable[Logger]) -> Iterator[None]:
    """Close every logger that has a `close` at the end of the block, even if another one fails."""
    with ExitStack() as stack:
        for logger in loggers:
            close = getattr(logger, "close", None)
            if callable(close):
                stack.callback(close)
        yield


class JSONLinesLogger:
    """Writes a line of JSON per step, while the next steps run. An existing file is continued."""

    def __init__(self, path: StrPath) -> None:
        """Nothing is written before `log`."""
        self.path = path_of(path, "path")
        self._lines: list[str] | None = None  # not written yet
        self._writing: Transfer[None] | None = None

    def log(self, values: Values, step: int) -> None:
        """Write a line. Values that are not finite become null, since JSON has no NaN; unknown ones
        are left out. OSError if an earlier line could not be written."""
        if self._lines is None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = f"cannot create {self.path.parent}: {error.strerror}"
                raise PathError(reason) from None
            # the beginning of a line stays one of its own
            self._lines = [""] if _ends_amid_a_line(self.path) else []
        finite = {name: _finite(value) for name, value in values.items() if value is not None}
        self._lines.append(json.dumps({"step": step, **finite}))
        if self._writing is None or self._writing.done():  # else they wait for the next call
            self._write()

    @interrupted_in_waits
    def _write(self) -> None:
        """Wait for the lines that are being written, and begin to write those that have come since.
        OSError if they could not be written."""
        written, self._writing = self._writing, None
        if written is not None:
            written.wait()
        if self._lines:
            text = "".join(f"{line}\n" for line in self._lines)
            self._writing = in_thread("offload-lines", asyncio.run, _append(self.path, text))
            self._lines.clear()

    def flush(self) -> None:
        """Wait until all steps are in the file. OSError if one could not be written."""
        while self._writing is not None or self._lines:
            self._write()

    def close(self) -> None:
        """Flush."""
        try:
            self.flush()
        finally:
            self._lines = None


async def _append(path: Path, text: str) -> None:
    async with aiofiles.open(path, "a", encoding="utf-8") as file:
        await file.write(text)


def _ends_amid_a_line(path: Path) -> bool:
    """Return whether a file ends amid a line, which a program that was killed may have left."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
