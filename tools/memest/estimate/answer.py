"""The whole answer of `memest` on one case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from offload.planning.choice.durations import duration
from offload.planning.plan.estimate import Change, Estimate
from offload.planning.plan.experts import ExpertEstimate
from offload.planning.step.step_time import MOST_PASSES
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.estimate.changes import changes, improvements
from offload.tools.memest.estimate.estimator import Estimator
from offload.tools.memest.hardware.parts import NCCL
from offload.tools.memest.source.model_source import SourceKind


def estimate(
    case: Case, estimator: Estimator | None = None, *, advise: bool = False
) -> Estimate:  # fmt: skip
    """Estimate a training or a generation, with changes that would make it fit if it does not.

    `estimator`: one that has seen the model before. `advise`: also what would make a step faster,
    which takes longer.
    """
    estimator = estimator or Estimator()
    found = estimator(case)
    ranks = _rank_notes(case, found.experts) if case.profile.ranks > 1 else ()
    notes = (*case_notes(case), *found.notes, *_missing(case), *ranks)
    if not found.fits:
        return replace(found, notes=notes, changes=changes(case, found, estimator))
    better: tuple[Change, ...] = ()
    if found.is_slow or found.wears_out_ssds:
        better = improvements(case, found, estimator)
    advised = estimator.advice(case) if advise else ()
    return replace(found, notes=notes, changes=(*better, *advised))


def case_notes(case: Case) -> Iterator[str]:
    """Yield the notes that hold for every system: on the model, and on the hardware."""
    yield from case.source.notes
    if case.source.shape.tables and not case.shape.tables:
        yield (
            "under micro_batches, and at stage 3 with other ranks, experts do not move one by one: "
            "a block has all of its own"
        )
    yield from case.profile.notes
    if case.profile.reserve_note:
        yield case.profile.reserve_note


def _missing(case: Case) -> Iterator[str]:
    if case.source.kind is SourceKind.SAFETENSORS:
        yield (
            "weights alone do not tell what forward keeps: activations are not counted, and there "
            "are no times; put the config.json beside them"
        )
    elif case.speeds is not None and case.workload.passes > MOST_PASSES:
        yield (
            f"of {case.workload.passes:,} passes per step {MOST_PASSES} are gone through (and "
            "drawn); each further one is taken to be like the last of these"
        )
    elif case.source.has_graph and case.speeds is None:
        yield "no times: speeds are not known; `memest calibrate` measures this machine's"


def _rank_notes(case: Case, found: ExpertEstimate | None) -> Iterator[str]:
    """Yield notes on the rank that the numbers are of, and on what is unknown about the others."""
    sharding, stage = case.sharding, case.config.zero.stage
    groups = "" if sharding.replicas == 1 else f" in {sharding.replicas} shard groups"
    same = sharding.of_experts(case.ep_size).world_size
    experts = f"; each expert is on {same} of them" if case.ep_size > 1 else ""
    yield (
        f"memory and disk (but for the checkpoint) are of one of {case.profile.ranks} ranks"
        f"{groups}, ZeRO stage {stage}{experts}"
    )
    if case.ep_size > 1:
        yield (
            f"experts over {case.ep_size} ranks: the model's layers of experts are taken to be "
            f"offload.moe.MoE(..., ep_size={case.ep_size}), with balanced routing"
        )
        yield (
            "not counted of experts over ranks: memory for tokens on their way; not timed: the "
            "exchange of tokens, and gradients and parameters among ranks with the same experts"
        )
    if stage in (1, 2):
        yield "under `no_sync` a rank holds whole gradients, which are not counted here"
    if case.timed:
        yield f"collectives are timed by the ratings of the links; latencies: {NCCL.source}"
        yield from _exchange(case, found)
    elif case.speeds is not None and case.source.has_graph:
        yield "no times: the network between the ranks is not known; name a machine (--profile)"


def _exchange(case: Case, found: ExpertEstimate | None) -> Iterator[str]:
    """Yield a note on the time of tokens on their way, which no step includes."""
    network = case.speeds.network if case.speeds is not None else None
    if found is None or network is None or not found.sent_nbytes:
        return
    calls = 4 * found.tables * case.workload.passes
    each = found.sent_nbytes * found.ep_size // (found.ep_size - 1) // calls
    seconds = calls * network.all_to_all_s(each, found.ep_size)
    yield (
        f"the exchange of tokens would take {duration(seconds)} of a step by the ratings of the "
        "links; the times above are without it"
    )
