"""The group of memest's commands: `memest MODEL` is `memest estimate MODEL`."""

from __future__ import annotations

import copy
from typing import Any

import typer.core

from offload.cli.errors import EXIT_BAD_INPUT, guarded

DEFAULT = "estimate"


class MemestGroup(typer.core.TyperGroup):
    """Commands of which one may be left unnamed.

    Whatever is no command and no option of the group belongs to that one. A model in a folder that
    has a command's name is `./max`. Expected errors end in a message and exit code 2: 1 means that
    a model does not fit.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the command that was left out."""
        own = {name for param in self.get_params(ctx) for name in param.opts}
        if args and args[0] not in self.commands and args[0] not in own:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; OffloadError and Ctrl-C become `typer.Exit`."""
        return guarded(
            lambda: super(MemestGroup, self).invoke(ctx), debug=bool(ctx.obj), failed=EXIT_BAD_INPUT
        )

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[MODEL] [OPTIONS] | COMMAND [ARGS]..."]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The options of the unnamed command, then the other commands."""
        shown = copy.copy(self)
        shown.commands = {n: c for n, c in self.commands.items() if n != DEFAULT}
        shown.params = [*self.commands[DEFAULT].params, *self.params]
        super(MemestGroup, shown).format_help(ctx, formatter)
