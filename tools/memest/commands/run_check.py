"""`memest check RUN/`: compare predicted and measured bytes per tier, and time."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from offload.planning.choice.run_check import Row, RunCheck, check_run
from offload.tiers.units import format_bytes
from offload.tools.memest.show import view
from offload.tools.memest.show.tables import ruled, show, show_json

# How far apart a prediction may be, by figure: beyond, the line is marked.
_TOLERANCES = {"RSS": 0.08, "step": 0.20}
_TOLERANCE = 0.03  # of a tier's ledger


def print_check(folder: Path, *, as_json: bool) -> None:
    """Print one line per figure. Raise ConfigError if the folder holds no checkable run."""
    found = check_run(folder)
    if as_json:
        show_json(_values(found))
        return
    show(check_table(found))
    for reason in found.missing:
        print(reason)
    ended = "" if found.finished else ", cut short: the most that was held at the end of one"
    print(f"{found.steps:,} step{'' if found.steps == 1 else 's'}{ended}")


def check_table(found: RunCheck) -> Table:
    table = ruled("", "predicted", "measured", "apart")
    for row in found.rows:
        apart = row.ratio - 1
        far = abs(apart) > _TOLERANCES.get(row.name, _TOLERANCE)
        far = far and not (row.is_bound and apart > 0)
        table.add_row(
            f"{row.name}, at most" if row.is_bound else row.name,
            _shown(row, row.predicted), _shown(row, row.measured),
            Text(f"{apart:+.1%}", style="yellow" if far else "green"),
        )  # fmt: skip
    return table


def _shown(row: Row, value: float) -> str:
    return view.duration(value) if row.unit == "seconds" else format_bytes(int(value))


def _values(found: RunCheck) -> dict[str, object]:
    rows = [
        {"name": row.name, "unit": row.unit, "predicted": row.predicted,
         "measured": row.measured, "ratio": row.ratio, "is_bound": row.is_bound}
        for row in found.rows
    ]  # fmt: skip
    return {
        "schema": "memest-check/1", "steps": found.steps, "finished": found.finished, "rows": rows,
        "missing": list(found.missing),
    }  # fmt: skip
