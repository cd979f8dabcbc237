"""`memest compare`: what a model would need under other systems, as a table or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from offload.tiers.errors import ConfigError
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.commands.options import EstimateOptions
from offload.tools.memest.commands.output import show_answer
from offload.tools.memest.commands.run_estimate import DOES_NOT_FIT, answered, read_question
from offload.tools.memest.estimate.answer import case_notes
from offload.tools.memest.estimate.estimator import Estimator
from offload.tools.memest.estimate.other_systems import Row, capacities_of, compare
from offload.tools.memest.estimate.result import Estimate
from offload.tools.memest.show import view
from offload.tools.memest.show.page import Cell, Table
from offload.tools.memest.show.render_terminal import bullets, cell_table

_TITLES = {Tier.HOST: "RAM of a node", Tier.NVME: "Disk of a node"}


def run_compare(asked: EstimateOptions) -> int:
    """Compare one model under every system, offload last. Return 0 if offload fits, 1 if not.

    Raise ConfigError for what only `memest MODEL` does: inference, a page, a configuration.
    """
    if asked.write is not None:
        raise ConfigError("compare: writes no configuration; leave --write out")
    if asked.inference:
        raise ConfigError("compare: is of training alone; leave --inference out")
    estimator = Estimator()
    question, estimate = answered(read_question(asked), estimator)
    case = question.case
    estimate = replace(estimate, notes=tuple(dict.fromkeys([*estimate.notes, *case_notes(case)])))
    facts = estimator.facts(case, estimate.config)
    rows = compare(case.source.shape, facts, estimate, case.profile)
    held = {tier for row in rows for tier in row.peaks}
    capacities = {t: n for t, n in capacities_of(case.profile).items() if t in held}
    show_answer(
        asked.chosen_format,
        asked.out,
        table=lambda: _table(estimate, rows, capacities),
        values=lambda: _values(estimate, rows, capacities),
    )
    return 0 if estimate.fits else DOES_NOT_FIT


def _table(estimate: Estimate, rows: Sequence[Row], capacities: dict[Tier, int]) -> RenderableType:
    heads = (f"{_TITLES.get(t, t.title)}\nof {format_bytes(n)}" for t, n in capacities.items())
    cells: list[list[str | Cell]] = []
    for row in rows:
        peaks = ((format_bytes(row.peaks[t]) if row.peaks.get(t) else "-", t) for t in capacities)
        shown = [Cell(text, state="bad" if tier in row.full else "") for text, tier in peaks]
        fits = Cell("no", state="bad") if row.full else Cell("yes", state="good")
        cells.append([row.name, *shown, fits])
    workload = f"{estimate.hardware}, {view.workload_text(estimate)}"
    title = f"{view.model_text(estimate, estimate.model)}\n{workload}"
    left = frozenset({0, len(capacities) + 1})
    table = cell_table(Table(("system", *heads, "fits"), cells, left=left))
    return Group(Text(title), table, "", *bullets(estimate.notes))


def _values(estimate: Estimate, rows: Sequence[Row], capacities: dict[Tier, int]) -> dict[str, Any]:
    systems = [
        {
            "system": row.name,
            "fits": not row.full,
            "peak_nbytes": {str(tier): row.peaks.get(tier, 0) for tier in capacities},
            "short": [str(tier) for tier in row.full],
        }
        for row in rows
    ]
    return {
        "schema": "memest-compare/3",
        "capacity_nbytes": {str(tier): nbytes for tier, nbytes in capacities.items()},
        "systems": systems,
        "notes": list(estimate.notes),
    }
