"""`offload migrate`: convert a configuration of DeepSpeed to one of offload."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from offload.deepspeed.migration import Migration, migrate, read_ds_config
from offload.display.plain_text import echo, plain
from offload.tiers.errors import ConfigError, PathError


def migrate_file(file: Path, out: Path | None, ranks: int | None, *, replace: bool) -> None:
    """Write the migrated configuration to `out`, or to standard output; warnings go to stderr, a
    scheduler's code to standard output. Raise ConfigError naming every key that is unknown or
    refused; nothing is written then."""
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks}: write 1 or more")
    if out is not None and out.exists() and not replace:
        raise PathError(f"-o {out}: this file exists; add --force to replace it")
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
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PathError(f"-o {out}: cannot be written: {error.strerror}") from None
    echo(f"wrote {out}")
    if told:
        echo(f"\n{told}")
    if made.printed_schedule is not None:
        echo("\n# the scheduler, for your loop (optimizer = engine.optimizer):")
        typer.echo(made.printed_schedule.code(), nl=False)


def _advice(made: Migration, file: Path, out: Path | None) -> str:
    """Return what to write for a file that leaves numbers to transformers' Trainer (`auto`)."""
    said = made.trainer_arguments.items()
    given = "".join(f", {name}={json.dumps(value)}" for name, value in said)
    return f"""{file} is a file for transformers' Trainer: {len(made.unfilled)} of its keys say
`auto`. OffloadTrainer takes what its YAML file does not name from TrainingArguments; leave
deepspeed= out of them:

    from offload.integrations.transformers import OffloadTrainer
    args = TrainingArguments(...{given})
    trainer = OffloadTrainer(model, args, train_dataset=..., offload="{out or "offload.yaml"}")
"""
