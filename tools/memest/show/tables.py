"""Tables, lists and JSON on a terminal, as all commands print them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from offload.display.console import PlainConsole, Prose


def ruled(*columns: str, title: str = "", left: Collection[str] = ()) -> Table:
    """Return a table, right-aligned except for the first column and those in `left`."""
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title_justify="left",
        title=Text(title, style="bold") if title else None, title_style="",
    )  # fmt: skip
    for index, name in enumerate(columns):
        number = index > 0 and name not in left
        table.add_column(name, justify="right" if number else "left", no_wrap=number or not index)
    return table


def plain(*columns: dict[str, Any], gap: int = 2) -> Table:
    """Return a table without lines and heads; a column is what `add_column` takes."""
    table = Table(box=None, show_header=False, padding=(0, gap, 0, 0))
    for column in columns:
        table.add_column(**column)
    return table


def bullets(lines: Iterable[str], indent: str = "") -> Iterator[Prose]:
    for line in dict.fromkeys(lines):
        yield Prose(line, first=f"{indent}· ")


def show(*parts: RenderableType) -> None:
    """Print to standard output, one below the other."""
    console = PlainConsole()
    for part in parts:
        console.print(part)


def show_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))
