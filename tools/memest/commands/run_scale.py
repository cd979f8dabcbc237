"""`memest scale`: a model on one to thousands of GPUs of a named machine, in three formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from offload.tiers.errors import ConfigError
from offload.tools.memest.commands.options import EstimateOptions, Format
from offload.tools.memest.commands.output import deliver
from offload.tools.memest.commands.run_estimate import DOES_NOT_FIT, read_question
from offload.tools.memest.estimate.case import Question
from offload.tools.memest.estimate.scaling import MOST_RANKS, Series, scaling
from offload.tools.memest.show.scale import print_tables, to_html, to_values


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
        deliver(to_html(question, found), output.out)
    elif output.chosen is Format.JSON:
        deliver(json.dumps(to_values(question, found), indent=1) + "\n", output.out)
    elif output.out is None:
        print_tables(question, found)
    else:
        raise ConfigError(f"--out {output.out}: a page or JSON; name a .html or a .json file")
