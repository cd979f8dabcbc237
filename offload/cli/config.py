"""`offload config`: the keys of the configuration, and a file with all values.

`offload migrate` makes such a file of a configuration of DeepSpeed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from offload.config.reference import Key
    from offload.deepspeed.migration import Migration

config_app = typer.Typer(help="The configuration's format.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(metavar="FILE", help="The YAML configuration.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "-o", "--option", metavar="KEY=VALUE",
        help="Replace a value of the file, for example -o optimizer.lr=1e-4. Repeatable.",
    ),
]  # fmt: skip


@config_app.command()
def show(file: File, option: Overrides = None) -> None:
    """Check FILE and print it with every default filled in."""
    from offload.config import OffloadConfig

    typer.echo(OffloadConfig.load(file, option or []).resolved().to_yaml(), nl=False)


@config_app.command()
def explain(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="For example optimizer.states, or a section.")
    ] = "",
) -> None:
    """Explain KEY: its meaning, type, default and an example. A section, or the whole
    configuration, is listed."""
    from rich.text import Text

    from offload.config.reference import explained
    from offload.display.console import PlainConsole

    known = explained(key)
    console = PlainConsole()
    if known.name:
        console.print(Text(known.name, style="bold"))
    console.print(known.meaning)
    console.print()
    if not known.keys:
        console.print(_facts(known))
        return
    console.print(_section(known))
    one = next(inner for inner in known.all() if not inner.keys)
    console.print(f"\nMore of one: offload config explain {one.name}")


def _facts(key: Key) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("type", key.type)
    if key.unit:
        table.add_row("unit", key.unit)
    table.add_row("default", key.default)
    table.add_row("example", key.example)
    return table


def _section(section: Key) -> Table:
    from offload.display.console import table

    shown = table("key", "default", "meaning")
    for key in section.keys:
        inside = f"{key.path[-1]}: ..." if key.keys else key.path[-1]
        shown.add_row(inside, key.default, key.meaning.partition(". ")[0].rstrip("."))
    return shown


def migrate_file(file: Path, out: Path | None, ranks: int | None, *, replace: bool) -> None:
    """Write the migrated configuration to `out`, or to standard output; warnings go to stderr, a
    scheduler's code to standard output. Raise ConfigError naming every key that is unknown or
    refused; nothing is written then."""
    from offload.checkpoint.format.disk import write_named
    from offload.cli.errors import check_target
    from offload.deepspeed.migration import migrate, read_ds_config
    from offload.display.plain_text import echo, plain
    from offload.tiers.errors import ConfigError

    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks}: write 1 or more")
    if out is not None:
        check_target(out, "-o", replace=replace)
    try:
        made = migrate(read_ds_config(file), ranks)
    except ConfigError as error:
        prefix = "" if str(error).startswith(str(file)) else f"{file}: "
        raise ConfigError(f"{prefix}{error}") from None
    text = made.to_yaml(plain(file.name))
    told = _advice(made, file, out) if made.unfilled else ""
    for warning in [*made.warnings, *made.for_loops]:
        echo(f"warning: {warning}", err=True)
    if out is None:
        typer.echo(text, nl=False)
        if told:
            echo(told, err=True)
        return
    write_named(out, text, "-o")
    echo(f"wrote {out}")
    if told:
        echo(f"\n{told}")
    if made.printed_schedule is not None:
        echo("\n# the scheduler, for your loop (optimizer = engine.optimizer):")
        typer.echo(made.printed_schedule.code(), nl=False)


def _advice(made: Migration, file: Path, out: Path | None) -> str:
    """Return what to write for a file that leaves numbers to transformers' Trainer (`auto`)."""
    return (
        f"{file} is a file for transformers' Trainer, which fills in {', '.join(made.unfilled)}. "
        "OffloadTrainer takes them, batch sizes, the scheduler and what its YAML file does not "
        "name from TrainingArguments; leave deepspeed= out of them, and write\n\n"
        "    from offload.integrations.transformers import OffloadTrainer\n"
        f'    trainer = OffloadTrainer(model, args, offload="{out or "offload.yaml"}")\n'
    )
