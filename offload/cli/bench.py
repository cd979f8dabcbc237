"""`offload bench`: the rates of the hardware beside the rates that offload reaches, in one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.config import Overrides
from offload.cli.errors import GuardedGroup

if TYPE_CHECKING:
    from offload.bench.record import Record


bench_app = typer.Typer(
    cls=GuardedGroup,
    help="Measure the hardware's limit and offload, interleaved; print ratios.",
    no_args_is_help=True,
)

Rounds = Annotated[
    int, typer.Option("--rounds", min=1, metavar="N", help="Rounds; medians are taken over them.")
]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write every measurement there, too.")
]
Folder = Annotated[
    Path | None,
    typer.Option("--path", metavar="DIR", help="Folder for files. Default: the temporary folder."),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The training's YAML. Default: a 151 M Llama."),
]
Systems = Annotated[
    str,
    typer.Option("--systems", metavar="NAMES", help="Names, separated by commas. Default: all."),
]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@bench_app.command()
def step(
    context: typer.Context,
    config: Config = None,
    option: Overrides = None,
    systems: Systems = "",
    path: Folder = None,
    rounds: Rounds = 7,
    json: Json = None,
) -> None:
    """Training steps of the systems plain (PyTorch), host and nvme, and the roofline."""
    from offload.bench.contenders import StepOptions

    options = StepOptions(config, tuple(option or []), path, _names(systems), rounds)
    _run(context, options, json)


def _run(context: typer.Context, options: object, json: Path | None) -> None:
    """Measure, print the result, and write it to a file if one was given. A status line on stderr
    shows progress, on a terminal."""
    from rich.console import Console

    from offload.bench.table import print_record
    from offload.cli.errors import check_target
    from offload.process.child import named

    if json is not None:
        check_target(json, "--json", replace=True)
    name = context.command.name
    run, columns = (named(f"offload.bench.{name}:{what}") for what in (f"run_{name}", "COLUMNS"))
    with Console(stderr=True).status("starting") as status:
        record: Record = run(options, status.update)
    print_record(record, columns)  # first: a full disk must not take it along
    if json is not None:
        record.write(json)
