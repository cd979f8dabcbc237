"""Libraries that print while they load or compile: keep it, and show its end if they fail."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, TypeVar

T = TypeVar("T")


def quietly(make: Callable[[], T], failed: str) -> tuple[T | None, str]:
    """The result of `make()` and "", or None and the reason: an optional peer must not end a bench.

    What is written to stdout and stderr meanwhile, by child processes too, is not shown. Any error
    becomes the reason: `failed` and the error's last line.
    """
    with tempfile.TemporaryFile("w+") as kept:
        try:
            with redirected(kept):
                return make(), ""
        except Exception as error:  # noqa: BLE001  any failure of a foreign library; it is shown
            lines = str(error).strip().splitlines() or [""]
            return None, f"{failed}: {type(error).__name__}: {lines[-1][:160]}"


@contextmanager
def redirected(target: IO[str]) -> Iterator[None]:
    """A context in which stdout and stderr, files and descriptors, are written to `target`."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(number) for number in (1, 2)]
    try:
        for number in (1, 2):
            os.dup2(target.fileno(), number)
        # Python's files may be others than those of the descriptors, as in a notebook
        with redirect_stdout(target), redirect_stderr(target):
            yield
            target.flush()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)
