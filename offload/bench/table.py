"""A record on a terminal: what was measured, then the ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offload.bench.record import Kind, Ratio, Record, Row

_STYLES = {Kind.LIMIT: "cyan", Kind.OURS: "bold", Kind.PEER: ""}
_MEASURES = {
    "seconds": "time",
    "parameters_per_s": "speed",
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


def print_record(record: Record, columns: Sequence[Column], console: Console | None = None) -> None:
    """Print two tables and the notes."""
    screen = console or Console(highlight=False)
    machine = record.machine
    where = machine.get("gpu") or f"{machine['cores']} x {machine['cpu']}"
    screen.print(Text(f"offload bench {record.bench}: {where}", style="bold"))
    screen.print(_rows(record, columns))
    if record.ratios:
        screen.print()
        screen.print(_ratios(record.ratios))
    absent = [f"{row.name}: {row.note}" for row in record.rows if not row.measured]
    for note in [*absent, *record.notes]:
        screen.print(Text(f"- {note}", style="dim"))


def _plain_table() -> Table:
    return Table(box=None, pad_edge=False, show_edge=False, header_style="bold")


def _rows(record: Record, columns: Sequence[Column]) -> Table:
    table = _plain_table()
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for row in record.rows:
        name = Text(row.name)
        if row.note and row.measured:
            name.append(f" ({row.note})", style="dim")
        cells = [column.text(row) for column in columns]
        table.add_row(str(row.kind), name, *cells, style=_STYLES[row.kind])
    return table


def _ratios(ratios: Sequence[Ratio]) -> Table:
    table = _plain_table()
    table.add_column("ratio, within rounds", overflow="fold")
    table.add_column("of", no_wrap=True)
    for heading in ("median", "range", "target"):
        table.add_column(heading, justify="right", no_wrap=True)
    for ratio in ratios:
        low, high = min(ratio.rounds), max(ratio.rounds)
        met = ratio.target is None or ratio.target.met(ratio.median)
        table.add_row(
            f"{ratio.of} / {ratio.to}", _MEASURES.get(ratio.measure, ratio.measure),
            Text(f"{ratio.median:.3f}", style="" if met else "yellow"),
            f"{low:.2f} .. {high:.2f}" if len(ratio.rounds) > 1 else "",
            "" if ratio.target is None else str(ratio.target),
        )  # fmt: skip
    return table
