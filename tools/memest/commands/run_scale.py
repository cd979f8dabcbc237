"""`memest scale`: a model on one to thousands of GPUs of a named machine, in three formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from offload.tiers.errors import ConfigError
from offload.tools.memest.commands.options import EstimateOptions, Format
from offload.tools.memest.commands.output import deliver
from offload.tools.memest.commands.run_estimate import DOES_NOT_FIT, read_question
from offload.tools.memest.estimate.case import Question
from offload.tools.memest.estimate.scaling import (
    MOST_RANKS,
    Point,
    Series,
    scaling,
)
from offload.tools.memest.show.scale_wording import (
    NARROW,
    NARROW_LEGEND,
    STATES,
    cells,
    statements,
)
from offload.tools.memest.show.summary import homes_text


def run_scale(asked: EstimateOptions) -> int:
    """Print or write what a run of every size takes. 0 if the largest fits, 1 if not."""
    if asked.output.write is not None or asked.output.advise or asked.output.chosen is Format.PNG:
        raise ConfigError("scale: gives a table, --format json or html; leave the others out")
    # one machine that is not here: there is nothing to be measured
    one = replace(asked.machine, nodes=None)
    output = replace(asked.output, no_measure=True)
    question = read_question(replace(asked, machine=one, output=output))
    case = question.case
    machine = case.profile.ranks_per_node
    most = MOST_RANKS if asked.machine.nodes is None else asked.machine.nodes * machine
    if not 1 <= most <= MOST_RANKS:
        raise ConfigError(
            f"--nodes {asked.machine.nodes}: 1 to {MOST_RANKS // machine} machines of {machine} "
            "GPUs are gone through"
        )
    found = scaling(case, most)
    _show(question, found, asked)
    return 0 if all(series.points[-1].found.fits for series in found) else DOES_NOT_FIT


def _show(question: Question, found: Sequence[Series], asked: EstimateOptions) -> None:
    output = asked.output
    if output.chosen is Format.HTML:
        from offload.tools.memest.show.render_scale import to_html

        deliver(to_html(question, found), output.out)
    elif output.chosen is Format.JSON:
        deliver(json.dumps(values(question, found), indent=1) + "\n", output.out)
    elif output.out is None:
        _print_tables(question, found)
    else:
        raise ConfigError(f"--out {output.out}: a page or JSON; name a .html or a .json file")


def _print_tables(question: Question, found: Sequence[Series]) -> None:
    from rich.text import Text

    from offload.tools.memest.show.tables import bullets, ruled, show

    case = question.case
    show(Text(f"{case.source.name} on machines like {case.profile.name}, simulated\n"))
    for series in found:
        for what, columns in NARROW:
            table = ruled(*columns, title=f"{series.name}: {what}")
            table.columns[0].justify = "right"
            for point in series.points:
                row = cells(point)
                table.add_row(*(row[name] for name in columns))
            show(table, "")
    show(f"{NARROW_LEGEND}\n", bullets(statements(question, found)))


def values(question: Question, found: Sequence[Series]) -> dict[str, Any]:
    return {
        "schema": "memest-scale/1",
        "model": question.case.source.name,
        "machine": question.case.profile.name,
        "series": [
            {"name": series.name, "points": [_point_values(point) for point in series.points]}
            for series in found
        ],
        "notes": list(statements(question, found)),
    }


def _point_values(point: Point) -> dict[str, Any]:
    sharding = point.sharding
    return {
        "ranks": point.ranks,
        "shards": sharding.ranks,
        "replicas": sharding.replicas,
        "fits": point.found.fits,
        "by_class": {str(state): point.held_nbytes(state) for state in STATES},
        "exchange_nbytes": point.shared_nbytes,
        "padding": point.shards.padding,
        "step_s": point.step.seconds,
        "network_s": point.network_s,
        "computing": point.efficiency,
        "tokens_per_s": point.step.tokens_per_s,
        "placements": homes_text(point.found.plan),
        "collectives": [asdict(total) for total in point.totals],
        "sequence": [
            {"name": call.name, "group": call.group, "nbytes": call.nbytes} for call in point.calls
        ],
    }
