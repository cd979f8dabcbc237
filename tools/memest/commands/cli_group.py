"""The group of memest's commands: `memest MODEL` is `memest estimate MODEL`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import typer

from offload.cli.errors import EXIT_BAD_INPUT, TidyGroup, guarded, print_error

DEFAULT = "estimate"
# typer brings its own click, or uses the one that is installed: this is whichever it is
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class MemestGroup(TidyGroup):
    """Commands of which one may be left unnamed.

    Whatever is no command and no option of the group belongs to that one. A model in a folder
    that has a command's name is `./check`. Expected errors end in a message and exit code 2: 1
    means that a model does not fit.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command if none is named."""
        own = {name for param in self.get_params(ctx) for name in param.opts}
        if args and args[0] not in self.commands and args[0] not in own:
            args = [DEFAULT, *args]
        if not args:  # answered with the help
            return super().parse_args(ctx, args)
        rest: list[str] = _one_line(lambda: super(MemestGroup, self).parse_args(ctx, args))
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; OffloadError and Ctrl-C become `typer.Exit`."""
        return guarded(
            lambda: _one_line(lambda: super(MemestGroup, self).invoke(ctx)),
            debug=bool(ctx.obj),
            failed=EXIT_BAD_INPUT,
        )

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[MODEL] [OPTIONS] | COMMAND [ARGS]..."]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the options of the default command, then the other commands."""
        shown = copy.copy(self)
        shown.commands = {n: c for n, c in self.commands.items() if n != DEFAULT}
        shown.params = [*self.commands[DEFAULT].params, *self.params]
        super(MemestGroup, shown).format_help(ctx, formatter)


def _one_line(run: Callable[[], Any]) -> Any:
    """Return `run()`; words that no command or option takes end like any other invalid input."""
    try:
        return run()
    except _UsageError as error:
        said = " ".join(error.format_message().split())  # type: ignore[attr-defined]
        print_error(f"{said[:1].lower()}{said[1:].removesuffix('.')}")
        raise typer.Exit(EXIT_BAD_INPUT) from None
