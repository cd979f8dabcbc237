"""A record on a terminal: measurements, then ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offload.bench.record import Kind, Ratio, Record, Row
from offload.display.console import PlainConsole, table

_STYLES = {Kind.LIMIT: "cyan", Kind.OURS: "bold", Kind.PEER: ""}
_MEASURES = {
    "seconds": "time",
    "parameters_per_s": "speed",
    "tokens_per_s": "tokens/s",
    "bytes_per_s": "bytes/s",
    "cpu_s_per_gb": "CPU time",
    "peak_rss_nbytes": "peak RSS",
}


@dataclass(frozen=True)
class Column:
    """A heading, and what a row shows under it."""

    heading: str
    text: Callable[[Row], str]


def number(measure: str, scale: float = 1.0, digits: int = 2) -> Callable[[Row], str]:
    """The median of a measure, or a fact, divided by `scale`; a dash where there is none."""

    def text(row: Row) -> str:
        value = row.facts.get(measure, row.median(measure))
        return "-" if math.isnan(value) else f"{value / scale:.{digits}f}"

    return text


@dataclass(frozen=True)
class Grid:
    """A table's cells. The first columns that are text are to the left, numbers to the right."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1  # columns of text


def rows_of(record: Record, columns: Sequence[Column]) -> Grid:
    """A row per system, its kind first."""
    rows = []
    for row in record.rows:
        name = f"{row.name} ({row.note})" if row.note and row.measured else row.name
        rows.append((str(row.kind), name, *(column.text(row) for column in columns)))
    return Grid(("", "", *(column.heading for column in columns)), rows, 2)


def ratios_of(record: Record) -> Grid:
    headings = ("ratio, within rounds", "of", "median", "range", "target")
    return Grid(headings, [_ratio(ratio) for ratio in record.ratios], 2)


def _ratio(ratio: Ratio) -> tuple[str, ...]:
    return (
        f"{ratio.of} / {ratio.to}", _MEASURES.get(ratio.measure, ratio.measure),
        f"{ratio.median:.3f}", span(ratio.rounds),
        "" if ratio.target is None else str(ratio.target),
    )  # fmt: skip


def span(values: Sequence[float]) -> str:
    """The lowest and the highest value; empty if there is only one."""
    return f"{min(values):.2f} .. {max(values):.2f}" if len(values) > 1 else ""


def print_record(record: Record, columns: Sequence[Column], console: Console | None = None) -> None:
    """Print two tables and the notes."""
    screen = console or PlainConsole()
    machine = record.machine
    where = machine.get("gpu") or f"{machine['cores']} x {machine['cpu']}"
    screen.print(Text(f"offload bench {record.bench}: {where}", style="bold"))
    screen.print(_drawn(rows_of(record, columns), [_STYLES[row.kind] for row in record.rows]))
    if record.ratios:
        met = [ratio.target is None or ratio.target.met(ratio.median) for ratio in record.ratios]
        screen.print()
        screen.print(_drawn(ratios_of(record), ["" if each else "yellow" for each in met]))
    absent = [f"{row.name}: {row.note}" for row in record.rows if not row.measured]
    for note in [*absent, *record.notes]:
        screen.print(Text(f"- {note}", style="dim"))


def _drawn(grid: Grid, styles: Sequence[str]) -> Table:
    shown = table(*grid.headings, numbers=range(grid.texts, len(grid.headings)))
    for row, style in zip(grid.rows, styles, strict=True):
        shown.add_row(*row, style=style)
    return shown
