"""`memest scale`: a model on one to thousands of GPUs of a named machine, in every format."""

from __future__ import annotations

from dataclasses import replace

from offload.tiers.errors import ConfigError
from offload.tools.memest.commands.options import EstimateOptions
from offload.tools.memest.commands.output import show_answer
from offload.tools.memest.commands.run_estimate import (
    DOES_NOT_FIT,
    read_question,
    refuse_inference,
)
from offload.tools.memest.estimate.scaling import MOST_RANKS, scaling
from offload.tools.memest.show.scale import scale_sheet, tables, to_values


def run_scale(asked: EstimateOptions) -> int:
    """Print or write what a run of every size takes. 0 if the largest fits, 1 if not."""
    if asked.output.write is not None or asked.output.advise:
        raise ConfigError("scale: writes no configuration; leave --write and --advise out")
    refuse_inference(asked.work, "scale")
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
    show_answer(
        output, table=lambda: tables(question, found), values=lambda: to_values(question, found),
        sheet=lambda: scale_sheet(question, found),
    )  # fmt: skip
    return 0 if all(series.points[-1].found.fits for series in found) else DOES_NOT_FIT
