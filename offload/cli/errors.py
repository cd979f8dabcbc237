"""Errors at the edge of the program: one screen on stderr, an exit code, no traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
import typer.core

from offload.interrupts import Terminated
from offload.tiers.errors import BudgetError, ConfigError, OffloadError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class GuardedGroup(typer.core.TyperGroup):
    """A group of commands whose expected errors end in a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; OffloadError and Ctrl-C become `typer.Exit`."""
        return guarded(lambda: super(GuardedGroup, self).invoke(ctx), debug=bool(ctx.obj))


def guarded(run: Callable[[], Any], *, debug: bool, failed: int = EXIT_FAILED) -> Any:
    """`run()`, with every expected error printed and turned into an exit code; `failed`: of those
    that are not the input's fault."""
    try:
        return run()
    except OffloadError as error:
        if debug:
            traceback.print_exc()
        print_error(str(error))
        bad_input = isinstance(error, ConfigError | BudgetError)
        raise typer.Exit(EXIT_BAD_INPUT if bad_input else failed) from None
    except KeyboardInterrupt as interrupt:
        if debug:
            traceback.print_exc()
        terminated = isinstance(interrupt, Terminated)
        if _rank() == "0":
            print(f"\n{'terminated' if terminated else 'interrupted'}", file=sys.stderr)
        raise typer.Exit(EXIT_TERMINATED if terminated else EXIT_INTERRUPTED) from None


@contextmanager
def failing_io(*, debug: bool, failed: int = EXIT_FAILED) -> Iterator[None]:
    """An OSError that no code expects ends in one line: the machine's fault, not the program's.

    Mostly that of standard output (a full disk, /dev/full). Around all of the program, since help
    and version are output, too.
    """
    try:
        yield
    except OSError as error:
        if debug:
            traceback.print_exc()
        _drop_output()
        what = f" {error.filename}" if error.filename is not None else ""
        print_error(f"cannot read or write{what}: {error.strerror or error}; --debug shows where")
        sys.exit(failed)


def _drop_output() -> None:
    """Output that cannot be written goes nowhere: the interpreter's flush at exit would fail."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def print_error(message: str) -> None:
    """`error: message` on stderr, red on a terminal."""
    # written without rich: its wrapping would cut paths that users copy
    red, plain = ("\x1b[31m", "\x1b[0m") if _colours(sys.stderr.isatty()) else ("", "")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "rank" not in message.partition(":")[0]:
        message = f"rank {_rank()}: {message}"
    indented = message.replace("\n", "\n       ")
    print(f"{red}error:{plain} {indented}", file=sys.stderr)


def _rank() -> str:
    """This process's, of those that `torchrun` has started."""
    return os.environ.get("RANK", "0")


def _colours(is_tty: bool) -> bool:
    return is_tty and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
