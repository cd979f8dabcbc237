"""Answers on a terminal, 80 columns or wider: tables, lists, whole pages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offload.display.console import PlainConsole, Prose
from offload.pages import page as pages

_STYLES = {"good": "green", "bad": "red", "": ""}


def page_table(page: pages.Page) -> RenderableType:
    """Return everything that a page says, verdict first."""
    return Group(*_parts(page))


def _parts(page: pages.Page) -> Iterator[RenderableType]:
    yield Text(page.verdict, style=f"bold {_STYLES[page.state] if page.state else 'yellow'}")
    if not page.about[0].startswith(page.title):
        yield Text(page.title)
    yield from (Text(part) for text in page.about for part in text.split(" · "))
    yield ""
    figures = plain({"style": "dim", "no_wrap": True}, {"justify": "right", "no_wrap": True}, {})
    for figure in page.figures:
        figures.add_row(figure.name, figure.value, figure.aside)
    yield figures
    for section in page.sections:
        if section.tables or section.lines:
            yield ""
            yield Text(section.title, style="bold")
        yield from (cell_table(table) for table in section.tables)
        yield from bullets(section.lines, indent="  ")


def cell_table(table: pages.Table) -> Table:
    """Return a page's table for a terminal."""
    found = ruled(*table.heads, left=[table.heads[index] for index in table.left])
    for row in table.rows:
        found.add_row(*(_cell(each) for each in row))
    if not any(table.heads):
        found.show_header = False
    return found


def _cell(cell: str | pages.Cell) -> RenderableType:
    if isinstance(cell, str):
        return Text(cell)
    bold = "bold " if cell.strong else ""
    text = Text(cell.text, style=f"{bold}{_STYLES[cell.state]}".strip())
    if cell.code:
        return Group(Prose(" ".join(cell.code), command=True), Prose(cell.text))
    return text


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
