"""`offload doctor`: the checks and the verdict, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from offload.cli.diagnosis import Check, run_checks, verdict
from offload.cli.errors import EXIT_BAD_INPUT, EXIT_FAILED
from offload.display.console import PlainConsole
from offload.display.plain_text import echo
from offload.memory.leftovers import clean
from offload.tiers.errors import OffloadError, PathError
from offload.tiers.units import format_bytes

_STYLES = {"ok": "green", "warn": "yellow", "off": "dim", "fail": "red"}


def clean_up(paths: Sequence[Path]) -> None:
    """Remove what dead runs left in `paths`, and print a line for each removal."""
    for path in paths:
        try:
            removed = clean(path)
        except (OSError, OffloadError) as error:
            raise PathError(f"cannot clean {path}: {error}") from None
        for each in removed:
            kept = " or made the checkpoint that it was to be" if each.pid is None else ""
            echo(f"removed{kept}: {each.path} ({format_bytes(each.nbytes)})", err=True)
        if not removed:
            echo(f"nothing of dead runs in {path}", err=True)


def print_checks(paths: Sequence[Path], as_json: bool) -> None:
    """Check the machine (and `paths`), and print the findings and the verdict. The exit code is 1
    if nothing can be trained, 2 if a path is no folder."""
    checks = run_checks(paths)
    found = verdict(checks)
    if as_json:
        listed = [asdict(check) for check in checks]
        typer.echo(json.dumps({**asdict(found), "checks": listed}, indent=2))
    else:
        console = PlainConsole()
        console.print(_table(checks))
        console.print()
        for check in checks:
            if check.advice:  # with commands to be copied: no table breaks them
                console.print(f"{check.name}: {check.advice}", style="italic", soft_wrap=True)
        console.print()
        for line in found.lines:
            console.print(line, style="green" if found.ready else "red", soft_wrap=True)
    if any(not path.is_dir() for path in paths):
        raise typer.Exit(EXIT_BAD_INPUT)
    if not found.ready:
        raise typer.Exit(EXIT_FAILED)


def _table(checks: Sequence[Check]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("what", overflow="fold", max_width=32)
    table.add_column("", no_wrap=True, width=4)
    table.add_column("found", overflow="fold")
    for check in checks:
        table.add_row(check.name, Text(check.status, style=_STYLES[check.status]), check.found)
    return table
