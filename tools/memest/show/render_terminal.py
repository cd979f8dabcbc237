"""Answers on a terminal, 80 columns or wider: tables, lists, whole pages."""

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offload.display.console import Prose, table
from offload.tools.memest.show import page as pages

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
    figures = table("", "", "", numbers={1})
    figures.show_header = False
    for figure in page.figures:
        figures.add_row(Text(figure.name, style="dim"), figure.value, figure.aside)
    yield figures
    for section in page.sections:
        if section.tables or section.lines:
            yield ""
            yield Text(section.title, style="bold")
        yield from (cell_table(each) for each in section.tables)
        yield from bullets(section.lines, indent="  ")


def cell_table(given: pages.Table) -> Table:
    """Return a page's table for a terminal."""
    shown = table(*given.heads, numbers=set(range(len(given.heads))) - given.left)
    shown.show_header = any(given.heads)
    for row in given.rows:
        shown.add_row(*(_cell(each) for each in row))
    return shown


def _cell(cell: str | pages.Cell) -> RenderableType:
    if isinstance(cell, str):
        return Text(cell)
    bold = "bold " if cell.strong else ""
    text = Text(cell.text, style=f"{bold}{_STYLES[cell.state]}".strip())
    if cell.code:
        return Group(Prose(" ".join(cell.code), command=True), Prose(cell.text))
    return text


def bullets(lines: Iterable[str], indent: str = "") -> Iterator[Prose]:
    for line in dict.fromkeys(lines):
        yield Prose(line, first=f"{indent}· ")
