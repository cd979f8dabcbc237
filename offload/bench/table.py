"""A record on a terminal: measurements, then ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from offload.bench.record import Kind, Record, Row
from offload.display.console import PlainConsole, table

_STYLES = {Kind.LIMIT: "cyan", Kind.OFFLOAD: "bold", Kind.PEER: ""}
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


def span(values: Sequence[float]) -> str:
    """The lowest and the highest value; empty if there is only one."""
    return f"{min(values):.2f} .. {max(values):.2f}" if len(values) > 1 else ""


def print_record(record: Record, columns: Sequence[Column]) -> None:
    """Print two tables and the notes."""
    screen, machine = PlainConsole(), record.machine
    where = machine.get("gpu") or f"{machine['cores']} x {machine['cpu']}"
    screen.print(Text(f"offload bench {record.bench}: {where}", style="bold"))
    screen.print(_rows(record, columns))
    if record.ratios:
        screen.print()
        screen.print(_ratios(record))
    absent = [f"{row.name}: {row.note}" for row in record.rows if not row.measured]
    for note in [*absent, *record.notes]:
        screen.print(Text(f"- {note}", style="dim"))


def _rows(record: Record, columns: Sequence[Column]) -> Table:
    """Return a table of the systems, the kind of each first."""
    headings = ("", "", *(column.heading for column in columns))
    shown = table(*headings, numbers=range(2, len(headings)))
    for row in record.rows:
        name = f"{row.name} ({row.note})" if row.note and row.measured else row.name
        cells = (column.text(row) for column in columns)
        shown.add_row(str(row.kind), name, *cells, style=_STYLES[row.kind])
    return shown


def _ratios(record: Record) -> Table:
    headings = ("ratio, within rounds", "of", "median", "range")
    shown = table(*headings, numbers=range(2, len(headings)))
    for ratio in record.ratios:
        measure = _MEASURES.get(ratio.measure, ratio.measure)
        median, covered = f"{ratio.median:.3f}", span(ratio.rounds)
        shown.add_row(f"{ratio.of} / {ratio.to}", measure, median, covered)
    return shown
