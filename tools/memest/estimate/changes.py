"""Single changes that make a case fit, each tried by planning anew.

A knob (`knobs`) is one thing that can be changed, from its mildest to its strongest change; a
stronger one never helps less. Of each knob the mildest change that fits is named.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import replace

from offload.config import OffloadConfig
from offload.planning.activations.facts import ActivationFacts
from offload.planning.plan.sizes import ITEMSIZE, least_nbytes, record_format
from offload.tiers.errors import ConfigError, UnsupportedError
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.estimate.estimator import Estimator
from offload.tools.memest.estimate.knobs import Knob, applied, knobs
from offload.tools.memest.estimate.result import Change, Estimate

MOST_SHOWN = 5
_ENORMOUS_NUMEL = 20 * 10**9
_LARGE_CHUNK_NUMEL = 1 << 22


def changes(case: Case, now: Estimate, estimator: Estimator) -> tuple[Change, ...]:
    """Return single changes that fit, the fastest step first."""

    def after(change: Change) -> Estimate | None:
        """Return the estimate of the changed case; None if the configuration refuses the change, or
        the case cannot fit."""
        tried = _changed(case, change)
        try:
            if tried is None or cannot_fit(tried, estimator.facts(tried, tried.config)):
                return None
            return estimator(tried)
        except (ConfigError, UnsupportedError):  # small chunks of an enormous model
            return None

    def fits(change: Change) -> bool:
        found = after(change)
        return found is not None and found.fits

    found: list[Change] = []
    for knob in knobs(case, now):
        if len(found) < MOST_SHOWN and fits(knob[-1]):
            change = _mildest(knob, fits)
            found.append(replace(change, step_factor=_factor(now, after(change))))
    return tuple(sorted(found, key=lambda change: change.step_factor or math.inf))


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
    if changed.config.optimizer.chunk == "auto" and _is_enormous(changed):
        overrides.append(f"optimizer.chunk={_LARGE_CHUNK_NUMEL}")
    return replace(changed, config=OffloadConfig.load(changed.config, overrides))


def _is_enormous(case: Case) -> bool:
    return case.source.shape.numel // case.profile.ranks >= _ENORMOUS_NUMEL


def _factor(before: Estimate, after: Estimate | None) -> float | None:
    if before.step is None or after is None or after.step is None:
        return None
    return after.step.seconds / before.step.seconds


def _mildest(knob: Knob, fits: Callable[[Change], bool]) -> Change:
    """Return the mildest change that fits, as the last one does."""
    return knob[bisect.bisect_left(range(len(knob) - 1), True, key=lambda at: fits(knob[at]))]


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
    weights = sum(least_nbytes(group, ITEMSIZE[config.precision]) for group in case.shape.groups)
    states = int(weights + case.shape.numel_trainable * (gradient + record))
    compute = hardware.device_nbytes or hardware.host_nbytes
    return working > compute or states // case.sharding.ranks + working > sum(there)
