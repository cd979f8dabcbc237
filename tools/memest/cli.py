"""The `memest` command: its words and options. Nothing heavy is imported here."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from offload.cli.errors import EXIT_BAD_INPUT, command_line, guarded, print_error, run
from offload.tools.memest.commands.options import EstimateOptions

DEFAULT = "estimate"
# typer brings its own click, or uses the one that is installed: this is whichever it is
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class MemestGroup(typer.core.TyperGroup):
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


def _one_line(call: Callable[[], Any]) -> Any:
    """Return `call()`; words that no command or option takes end like any other invalid input."""
    try:
        return call()
    except _UsageError as error:
        said = " ".join(error.format_message().split())  # type: ignore[attr-defined]
        print_error(f"{said[:1].lower()}{said[1:].removesuffix('.')}")
        raise typer.Exit(EXIT_BAD_INPUT) from None


_HELP = """Say what training a model takes: memory by place, seconds per step, and what to change.

MODEL is a Hugging Face config.json or model folder, a safetensors file or index, module:function, \
or an offload YAML; nothing of a model folder is executed.

Exit code: 0 fits, 1 does not, 2 bad input.
"""

app = command_line("memest", MemestGroup, _HELP)


def _asking(name: str, *, hidden: bool = False) -> Callable[[Callable[..., int]], None]:
    """Turn a function of `EstimateOptions` into a command with an option for each of its fields.
    The options are checked against each other first; the function returns the exit code."""

    def register(answer: Callable[..., int]) -> None:
        hints = get_type_hints(EstimateOptions, include_extras=True)
        params = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
            for field in fields(EstimateOptions)
        ]

        def command(**given: Any) -> None:
            asked = EstimateOptions(**given)
            asked.check()
            raise typer.Exit(answer(asked))

        command.__doc__ = answer.__doc__
        command.__signature__ = inspect.Signature(params)  # type: ignore[attr-defined]
        command.__annotations__ = hints
        app.command(name, hidden=hidden)(command)

    return register


@_asking(DEFAULT, hidden=True)
def estimate(asked: EstimateOptions) -> int:
    """Estimate training of MODEL: memory by place, seconds per step, and changes that would fit."""
    from offload.tools.memest.commands.run_estimate import run_estimate

    return run_estimate(asked)


@app.command("check")
def check(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of `offload train`.")],
) -> None:
    """Compare the predicted and measured bytes per tier, and time, of a run."""
    from offload.tools.memest.commands.run_check import print_check

    print_check(folder)


@app.command("calibrate")
def calibrate(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH", help="Folders for swap files. Default: a temporary folder."),
    ] = None,
) -> None:
    """Measure this machine's speeds again, and store them."""
    from offload.tools.memest.commands.run_machine import measure_again

    measure_again(paths or [])


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; ends the process with its exit code."""
    run(app, arguments, failed=EXIT_BAD_INPUT)
