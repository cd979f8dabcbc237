"""Options and errors of every command line. An error is one screen on stderr and an exit code."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from offload import __version__
from offload.display.plain_text import plain_lines
from offload.process.interrupts import Terminated
from offload.tiers.errors import BudgetError, ConfigError, OffloadError, PathError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def _print_version(context: typer.Context, wanted: bool) -> None:
    if wanted:
        typer.echo(f"{context.info_name} {__version__}")
        raise typer.Exit


def check_target(path: Path, option: str, *, replace: bool) -> None:
    """Raise PathError, before any work is done, if `path` cannot be written.

    `replace`: whether a file that is there may be.
    """
    if path.is_dir():
        raise PathError(f"{option} {path}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise PathError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if path.exists() and not replace and path.is_file():
        raise PathError(f"{option} {path}: there is such a file; add --force to replace it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PathError(f"{option} {path}: not allowed to write there")


def command_line(name: str, group: type[typer.core.TyperGroup], help_: str) -> typer.Typer:
    """Return a command line without commands, which has the options --version and --debug."""
    app = typer.Typer(
        name=name,
        cls=group,
        help=help_,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def options(
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=_print_version, is_eager=True, help="Print the version."
            ),
        ] = False,
        debug: Annotated[
            bool, typer.Option("--debug", help="Show the traceback of an error.")
        ] = False,
    ) -> None:
        pass

    return app


def run(app: typer.Typer, arguments: list[str] | None, *, failed: int = EXIT_FAILED) -> None:
    """Run a command line; ends the process with its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    # --debug is understood anywhere
    debug = "--debug" in words
    with failing_io(debug=debug, failed=failed):
        app([word for word in words if word != "--debug"], prog_name=app.info.name, obj=debug)


class GuardedGroup(typer.core.TyperGroup):
    """A group of commands whose expected errors end in a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; OffloadError and Ctrl-C become `typer.Exit`."""
        return guarded(lambda: super(GuardedGroup, self).invoke(ctx), debug=bool(ctx.obj))


def guarded(run: Callable[[], Any], *, debug: bool, failed: int = EXIT_FAILED) -> Any:
    """Return `run()`; an expected error is printed and ends the process with an exit code, which is
    `failed` unless the input is at fault."""
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
    """End an OSError that no code expects with one line: the machine is at fault, not the program.

    Most often standard output fails (a full disk, /dev/full). This wraps the whole program, since
    help and version are output as well.
    """
    if logging.lastResort is not None:  # prints warnings, of whatever names
        logging.lastResort.setFormatter(_PlainFormatter())
    try:
        yield
    except OSError as error:
        if debug:
            traceback.print_exc()
        _drop_output()
        what = f" {error.filename}" if error.filename is not None else ""
        print_error(f"cannot read or write{what}: {error.strerror or error}; --debug shows where")
        sys.exit(failed)


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return plain_lines(super().format(record))


def _drop_output() -> None:
    """Send unwritable output to /dev/null: the interpreter's flush at exit would fail."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def print_error(message: str) -> None:
    """Print `error: message` to stderr, in red on a terminal."""
    # written without rich: its wrapping would cut paths that users copy
    term, plain = os.environ.get("TERM"), "NO_COLOR" in os.environ or not sys.stderr.isatty()
    red, normal = ("", "") if plain or term == "dumb" else ("\x1b[31m", "\x1b[0m")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "rank" not in message.partition(":")[0]:
        message = f"rank {_rank()}: {message}"
    indented = plain_lines(message).replace("\n", "\n       ")
    print(f"{red}error:{normal} {indented}", file=sys.stderr)


def _rank() -> str:
    """Return the rank of this process among those that `torchrun` has started."""
    return os.environ.get("RANK", "0")
