"""The whole answer of `memest` on one case, with single changes that make it fit, each tried by
planning anew.

A knob (`knobs`) is one thing that can be changed, from its mildest to its strongest change; a
stronger one never helps less. Of each knob the mildest change that fits is named.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import replace

from offload.config import OffloadConfig
from offload.planning.activations.facts import ActivationFacts
from offload.planning.plan.sizes import ITEMSIZE, record_format, stored_nbytes
from offload.planning.step.planned_run import MAX_PASSES
from offload.tiers.errors import ConfigError, UnsupportedError
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.estimate.estimator import Estimator
from offload.tools.memest.estimate.knobs import applied, knobs
from offload.tools.memest.estimate.result import Change, Estimate
from offload.tools.memest.source.model_source import SourceKind

MAX_SHOWN = 5
_ENORMOUS_NUMEL = 20 * 10**9
_LARGE_CHUNK_NUMEL = 1 << 22


def estimate(case: Case) -> Estimate:
    """Estimate a training or a generation, with changes that would make it fit if it does not."""
    estimator = Estimator()
    result = estimator(case)
    ranks = _rank_notes(case) if case.profile.ranks > 1 else ()
    notes = (*case_notes(case), *result.notes, *_missing(case), *ranks)
    more = () if result.fits else changes(case, result, estimator)
    return replace(result, notes=notes, changes=more)


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
    elif case.speeds is not None and case.workload.passes > MAX_PASSES:
        yield (
            f"of {case.workload.passes:,} passes per step {MAX_PASSES} are gone through; "
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


def changes(case: Case, now: Estimate, estimator: Estimator) -> tuple[Change, ...]:
    """Return single changes that fit, the fastest step first."""

    def after(change: Change) -> Estimate | None:
        """Return the estimate of the changed case; None if the configuration refuses the change, or
        the case cannot fit."""
        changed = _changed(case, change)
        try:
            if changed is None or cannot_fit(changed, estimator.facts(changed, changed.config)):
                return None
            return estimator(changed)
        except (ConfigError, UnsupportedError):  # small chunks of an enormous model
            return None

    def fits(change: Change) -> bool:
        changed = after(change)
        return changed is not None and changed.fits

    fitting: list[Change] = []
    for knob in knobs(case, now):
        if len(fitting) < MAX_SHOWN and fits(knob[-1]):
            # of several the mildest, as the last one fits
            at = bisect.bisect_left(range(len(knob) - 1), True, key=lambda at: fits(knob[at]))
            then = after(knob[at])
            factor = None
            if now.step is not None and then is not None and then.step is not None:
                factor = then.step.seconds / now.step.seconds
            fitting.append(replace(knob[at], step_factor=factor))
    return tuple(sorted(fitting, key=lambda change: change.step_factor or math.inf))


def _changed(case: Case, change: Change) -> Case | None:
    """Return the case with the change; None if the configuration refuses it.

    A case that leaves recomputation open fits if it fits with full recomputation: its step then is
    sure to fit, if not the fastest. An enormous model that leaves its chunks open gets large ones,
    since chunks are planned one by one.
    """
    changed = applied(change, case)
    if changed is None:
        return None
    overrides = []
    if changed.config.placement.activations.checkpoint == "auto":
        overrides.append("placement.activations.checkpoint=true")
    numel = case.source.shape.numel // case.profile.ranks
    if changed.config.optimizer.chunk == "auto" and numel >= _ENORMOUS_NUMEL:
        overrides.append(f"optimizer.chunk={_LARGE_CHUNK_NUMEL}")
    return replace(changed, config=OffloadConfig.load(changed.config, overrides))


def cannot_fit(case: Case, facts: ActivationFacts) -> bool:
    """Whether no placement can hold the case, which takes no plan to see: its states are
    more than all places together, or one pass works on more than the place
    where the model computes. False decides nothing."""
    hardware, config = case.hardware, case.config
    there = (hardware.device_nbytes, hardware.host_nbytes, hardware.nvme_free_nbytes)
    working = facts.peak_nbytes
    if config.placement.activations.tier != "device":
        working = min(working, facts.peak_elsewhere_nbytes)
    numel = 1 << 24  # of so many, the gaps between arrays are next to nothing
    record = record_format(config).nbytes(numel) / numel
    gradient = 4 if config.sums_gradients else ITEMSIZE[config.precision]
    weights = sum(stored_nbytes(group, ITEMSIZE[config.precision]) for group in case.shape.groups)
    states = int(weights + case.shape.numel_trainable * (gradient + record))
    compute = hardware.device_nbytes or hardware.host_nbytes
    return working > compute or states // case.sharding.ranks + working > sum(there)
