"""`offload doctor`: the checks as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offload.doctor import Check, run_checks

_STYLES = {"ok": "green", "warn": "yellow", "off": "dim"}


def print_checks(paths: Sequence[Path], as_json: bool) -> None:
    """Look at the machine (and at `paths`) and print what was found."""
    checks = run_checks(paths)
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
        return
    console = Console()
    console.print(_table(checks))
    warnings = sum(check.status == "warn" for check in checks)
    if warnings:
        console.print(f"{warnings} to look at; the advice is below each.", style="yellow")


def _table(checks: Sequence[Check]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("what", overflow="fold", max_width=32)
    table.add_column("", no_wrap=True, width=4)
    table.add_column("found", overflow="fold")
    for check in checks:
        found = Text(check.found)
        if check.advice:
            found.append(f"\n{check.advice}", style="italic")
        table.add_row(check.name, Text(check.status, style=_STYLES[check.status]), found)
    return table
