"""The whole answer of `memest` on one case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from offload.planning.step.planned_run import MOST_PASSES
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.estimate.changes import changes
from offload.tools.memest.estimate.estimator import Estimator
from offload.tools.memest.estimate.result import Estimate
from offload.tools.memest.source.model_source import SourceKind


def estimate(case: Case) -> Estimate:
    """Estimate a training or a generation, with changes that would make it fit if it does not."""
    estimator = Estimator()
    found = estimator(case)
    ranks = _rank_notes(case) if case.profile.ranks > 1 else ()
    notes = (*case_notes(case), *found.notes, *_missing(case), *ranks)
    more = () if found.fits else changes(case, found, estimator)
    return replace(found, notes=notes, changes=more)


def case_notes(case: Case) -> Iterator[str]:
    """Yield the notes that hold for every system: on the model, and on the hardware."""
    yield from case.source.notes
    if case.source.shape.tables and not case.shape.tables:
        yield (
            "at stage 3 with other ranks experts do not move one by one: a block has all of its own"
        )
    yield from case.profile.all_notes


def _missing(case: Case) -> Iterator[str]:
    if case.source.kind is SourceKind.SAFETENSORS:
        yield (
            "weights alone do not tell what forward keeps: activations are not counted, and there "
            "are no times; put the config.json beside them"
        )
    elif case.speeds is not None and case.workload.passes > MOST_PASSES:
        yield (
            f"of {case.workload.passes:,} passes per step {MOST_PASSES} are gone through; "
            "each further one is taken to be like the last of these"
        )
    elif case.source.has_graph and case.speeds is None:
        yield "no times: speeds are not known; `memest calibrate` measures this machine's"


def _rank_notes(case: Case) -> Iterator[str]:
    """Yield notes on the rank that the numbers are of, and on what is unknown about the others."""
    sharding, stage = case.sharding, case.config.zero.stage
    groups = "" if sharding.replicas == 1 else f" in {sharding.replicas} shard groups"
    yield (
        f"memory and disk (but for the checkpoint) are of one of {case.profile.ranks} ranks"
        f"{groups}, ZeRO stage {stage}"
    )
    if stage in (1, 2):
        yield "under `no_sync` a rank holds whole gradients, which are not counted here"
    if case.speeds is not None and case.source.has_graph:
        yield "no times: the network between the ranks is not known"
