"""`memest compare`: what a model would need under other systems, as a table or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from offload.pages.page import Cell, Table
from offload.planning.plan.estimate import Estimate
from offload.tiers.errors import ConfigError
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.commands.options import EstimateOptions
from offload.tools.memest.commands.output import show_answer
from offload.tools.memest.commands.run_estimate import DOES_NOT_FIT, answered, read_question
from offload.tools.memest.estimate.answer import case_notes
from offload.tools.memest.estimate.estimator import Estimator
from offload.tools.memest.estimate.other_systems import Row, compare
from offload.tools.memest.show import view
from offload.tools.memest.show.render_json import places
from offload.tools.memest.show.tables import bullets, cell_table

_TITLES = {Tier.DEVICE: "GPU memory", Tier.HOST: "RAM of a node", Tier.NVME: "Disk of a node"}


def run_compare(asked: EstimateOptions) -> int:
    """Compare one model under every system, offload last. Return 0 if offload fits, 1 if not.

    Raise ConfigError for what only `memest MODEL` does: inference, a page, a configuration.
    """
    output = asked.output
    if output.write is not None or output.advise:
        raise ConfigError("compare: writes no configuration; leave --write and --advise out")
    if asked.work.inference:
        raise ConfigError("compare: is of training alone; leave --inference out")
    estimator = Estimator()
    question, ours = answered(read_question(asked), estimator)
    case = question.case
    ours = replace(ours, notes=tuple(dict.fromkeys([*ours.notes, *case_notes(case)])))
    model = case.shape if case.ep_size > 1 else case.source.shape
    rows = compare(model, estimator.facts(case, ours.config), ours, case.profile)
    show_answer(
        output.chosen, output.out,
        table=lambda: _table(ours, rows), values=lambda: _values(ours, rows),
    )  # fmt: skip
    return 0 if ours.fits else DOES_NOT_FIT


def _table(ours: Estimate, rows: Sequence[Row]) -> RenderableType:
    capacities = {t: p.capacity_nbytes for row in rows for t, p in row.places.items()}
    tiers = [tier for tier in Tier if tier in capacities]
    heads = (f"{_TITLES[tier]}\nof {format_bytes(capacities[tier])}" for tier in tiers)
    cells: list[list[str | Cell]] = [
        [
            str(row.system),
            *(_peak_cell(row, tier) for tier in tiers),
            Cell("yes", state="good") if row.fits else Cell("no", state="bad"),
        ]
        for row in rows
    ]
    title = f"{view.model_text(ours, ours.model)}\n{ours.hardware}, {view.workload_text(ours)}"
    table = Table(("system", *heads, "fits"), cells, left=frozenset({0, len(tiers) + 1}))
    return Group(Text(title), cell_table(table), "", *bullets(ours.notes))


def _peak_cell(row: Row, tier: Tier) -> Cell:
    place = row.places.get(tier)
    text = format_bytes(place.peak_nbytes) if place and place.peak_nbytes else "-"
    return Cell(text, state="bad" if tier in row.full else "")


def _values(ours: Estimate, rows: Sequence[Row]) -> dict[str, Any]:
    systems = [
        {
            "system": str(row.system),
            "fits": row.fits,
            "places": places(row.places),
            "short": [str(tier) for tier in row.full],
        }
        for row in rows
    ]
    return {"schema": "memest-compare/2", "systems": systems, "notes": list(ours.notes)}
