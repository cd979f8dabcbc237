"""Loggers, which receive the figures of every step of a run.

    engine.watch(loggers=[JSONLinesLogger("run.jsonl"), TensorBoardLogger("tb"), print_it])
    def print_it(values, step): ...

A logger is anything with a method `log(values, step)`, or that can be called so. `values` are those
of a `StepMetrics` (`offload/runs/metrics.py`) by name; unknown ones are None. `close()` is
called at the end, if there is one. The libraries behind these are imported when one is made.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import aiofiles

from offload.config.paths import StrPath, path_of
from offload.swap.threads.shield import Executor, is_done, result_of
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
        return _Called(given)
    raise ConfigError(
        f"loggers: a {type(given).__name__} has no method log(values, step) and cannot be called so"
    )


class _Called:
    """A function as a logger."""

    def __init__(self, function: Callable[[dict[str, Any], int], Any]) -> None:
        self._function = function

    def log(self, values: Values, step: int) -> None:
        self._function(dict(values), step)


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
        self._writing: Future[None] | None = None
        self._thread: Executor

    def log(self, values: Values, step: int) -> None:
        """Write a line. Values that are not finite become null, since JSON has no NaN; unknown ones
        are left out. OSError if an earlier line could not be written."""
        if self._lines is None:
            _make_parent(self.path)
            # the beginning of a line stays one of its own
            self._lines = [""] if _ends_amid_a_line(self.path) else []
            self._thread = Executor(1, "offload-lines")
        finite = {name: _finite(value) for name, value in values.items() if value is not None}
        self._lines.append(json.dumps({"step": step, **finite}))
        if self._writing is None or is_done(self._writing):  # else they wait for the next call
            self._write()

    def _write(self) -> None:
        """Wait for the lines that are being written, and begin to write those that have come since.
        OSError if they could not be written."""
        written, self._writing = self._writing, None
        if written is not None:
            result_of(written)
        if self._lines:
            text = "".join(f"{line}\n" for line in self._lines)
            self._writing = self._thread.submit(asyncio.run, _append(self.path, text))
            self._lines.clear()

    def flush(self) -> None:
        """Wait until all steps are in the file. OSError if one could not be written."""
        while self._writing is not None or self._lines:
            self._write()

    def close(self) -> None:
        """Flush, and end the thread that writes."""
        if self._lines is None:
            return
        try:
            self.flush()
        finally:
            self._lines = None
            self._thread.shutdown()


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


# ---------------------------------------------------------------- programs with curves
class TensorBoardLogger:
    """Curves for TensorBoard, in a folder of its own."""

    def __init__(self, folder: StrPath, *, purge_step: int | None = None) -> None:
        """`purge_step`: curves of an earlier run in the folder end before this step. Raises
        ConfigError if the package `tensorboard` is missing."""
        logs = str(path_of(folder, "folder"))
        _check("TensorBoardLogger", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(logs, purge_step=purge_step)
        self._curves = _Curves()

    def log(self, values: Values, step: int) -> None:
        for name, value in self._curves.of(values):
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """Curves for Weights & Biases, named `offload/...` over `offload/step`: in the run that the
    program has begun, or in a new one with `options` for `wandb.init`."""

    def __init__(self, **options: Any) -> None:
        """Raises ConfigError if the package `wandb` is missing, and for options beside a run that
        has begun; wandb's own errors if it is not logged in."""
        _check("WandbLogger", "wandb")
        import wandb

        self._own = wandb.run is None
        if options and not self._own:
            raise ConfigError(
                f"WandbLogger({', '.join(options)}=...): the program's own wandb.init has begun a "
                "run, which is logged to; give the options there, or end that run first"
            )
        self._run = wandb.init(**options) if self._own else wandb.run
        self._run.define_metric("offload/step")
        self._run.define_metric("offload/*", step_metric="offload/step")
        self._curves = _Curves()

    def log(self, values: Values, step: int) -> None:
        named = {f"offload/{name}": value for name, value in self._curves.of(values)}
        self._run.log({**named, "offload/step": step})

    def close(self) -> None:
        if self._own:
            self._run.finish()


class _Curves:
    """Converts a row to numbers by name. Totals since the start are shown per second: `GB per
    s/nvme read`, and the seconds waited in a step as shares of it: `waiting/nvme`."""

    def __init__(self) -> None:
        self._before: Values = {}

    def of(self, values: Values) -> Iterator[tuple[str, float]]:
        before, self._before = self._before, values
        rest = {name: value for name, value in values.items() if name not in _COUNTED}
        ours = dict(_flat(rest))
        for name, value in ours.items():
            if value is not None:
                yield name, value
        for name, value in values["figures"].items():
            yield (f"figures/{name}" if name in ours else name), value
        if values["seconds"] > 0:
            for key, value in values["waited"].items():
                yield f"waiting/{key}", value / values["seconds"]
        seconds = values["elapsed_seconds"] - before.get("elapsed_seconds", math.inf)
        if seconds <= 0:  # the first row
            return
        for key, value in values["moved"].items():
            yield f"GB per s/{key}", (value - before["moved"].get(key, 0)) / seconds / 1e9


_COUNTED = ("moved", "waited", "elapsed_seconds", "figures")


def check_names(names: Iterable[str]) -> None:
    """Raise ConfigError if the library behind one of `train.loggers` is missing."""
    for name in names:
        _check(f"train.loggers: {name}", name)


def _flat(values: Values, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield figures by name; those of an inner mapping are named like `tiers/host`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _make_parent(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PathError(f"cannot create {path.parent}: {error.strerror}") from None


def _check(who: str, package: str) -> None:
    # a folder of that name, such as wandb makes where it runs, would be found as a package, too
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ConfigError(
            f"{who} needs the package {package}, which is not installed; pip install {package}, "
            "or leave that logger out"
        )
