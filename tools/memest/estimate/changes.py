"""Changes that make a case fit: the smallest sets of them, each tried by planning anew.

A knob (`knobs`) is one thing that can be changed, its options from the mildest to the strongest
change; a stronger option never helps less. A set takes one option of each of some knobs. It is
minimal if it works, and neither without one of its options nor with a milder one in its place.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import TypeVar

from offload.config import OffloadConfig
from offload.planning.activations.facts import ActivationFacts
from offload.planning.plan.estimate import Change, Estimate
from offload.planning.plan.sizes import ITEMSIZE, least_nbytes, record_formats
from offload.tiers.errors import UnsupportedError
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.estimate.estimator import Estimator
from offload.tools.memest.estimate.knobs import Option, knobs

MOST_CHANGES_IN_A_SET, MOST_SHOWN = 3, 5
_ENOUGH = 3  # with so many ways, larger sets of changes are not looked for
_MOST_TRIES, _MOST_TRIES_ENORMOUS = 30, 14
_ENORMOUS_NUMEL = 20 * 10**9
_LARGE_CHUNK_NUMEL = 1 << 22
R = TypeVar("R")


def changes(case: Case, now: Estimate, estimator: Estimator) -> tuple[Change, ...]:
    """Return minimal sets that fit, those of fewer changes first, then by time per step."""

    def fits(options: tuple[Option, ...]) -> bool:
        """Whether the case fits with all changes; False if the configuration refuses them."""
        tried = _changed(case, options)
        try:
            return (
                tried is not None
                and not cannot_fit(tried, estimator.facts(tried, tried.config))
                and estimator.fits(tried)
            )
        except UnsupportedError:  # a batch of 2 in 4 pieces
            return False

    tries = _MOST_TRIES_ENORMOUS if _is_enormous(case) else _MOST_TRIES
    all_knobs = knobs(case, now, estimator.facts(case, now.config).peak_at)
    found: list[tuple[int, Change]] = []
    for options in minimal_sets(all_knobs, fits, most_tries=tries, enough=_ENOUGH):
        tried = _changed(case, options)
        if len(found) < MOST_SHOWN and tried is not None and (after := estimator(tried)).fits:
            found.append((len(options), _change(options, now, after)))
    found.sort(key=lambda pair: (pair[0], pair[1].step_factor or float("inf")))
    return tuple(change for _, change in found)


def _changed(case: Case, options: tuple[Option, ...]) -> Case | None:
    """Return the case with all changes; None if the configuration refuses them together.

    A case that leaves recomputation open fits if it fits with full recomputation: its step then is
    sure to fit, if not the fastest. An enormous model that leaves its chunks open gets large ones,
    since chunks are planned one by one.
    """
    changed: Case | None = case
    for option in options:
        changed = option.apply(changed) if changed is not None else None
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


def _change(options: tuple[Option, ...], before: Estimate, after: Estimate) -> Change:
    settings: Mapping[str, str] = {k: v for option in options for k, v in option.settings.items()}
    text = "; ".join(option.text for option in options)
    if before.step is None or after.step is None:
        return Change(settings, text)
    return Change(settings, text, after.step.seconds / before.step.seconds)


# ---------------------------------------------------------------- the search
def minimal_sets(
    knobs: Sequence[Sequence[R]], works: Callable[[tuple[R, ...]], bool], *, most_tries: int,
    enough: int,
) -> list[tuple[R, ...]]:  # fmt: skip
    """Return minimal sets of one change, then of two, then of three; larger ones only while fewer
    than `enough` are known. Deterministic; earlier knobs are tried first."""
    answers: dict[tuple[tuple[int, int], ...], bool] = {}

    def options_of(chosen: Mapping[int, int]) -> tuple[R, ...]:
        return tuple(knobs[knob][option] for knob, option in chosen.items())

    def try_set(chosen: Mapping[int, int]) -> bool:
        key = tuple(chosen.items())
        if key not in answers:
            if len(answers) == most_tries:
                raise _EnoughTriedError
            answers[key] = works(options_of(chosen))
        return answers[key]

    found: list[dict[int, int]] = []  # the option of each knob
    with suppress(_EnoughTriedError):  # sets not known to be minimal are left out
        for size in range(1, MOST_CHANGES_IN_A_SET + 1):
            for some in combinations(range(len(knobs)), size):
                part_is_enough = any(set(each) <= set(some) for each in found)
                if part_is_enough or (size > 1 and len(found) >= enough):
                    continue
                chosen = {knob: len(knobs[knob]) - 1 for knob in some}
                if try_set(chosen):
                    found.append(_mildest(chosen, try_set))
    return [options_of(chosen) for chosen in found]


class _EnoughTriedError(Exception):
    """Ends a search that has tried enough."""


def _mildest(chosen: dict[int, int], works: Callable[[Mapping[int, int]], bool]) -> dict[int, int]:
    """Return the mildest options of the same knobs that work together, as `chosen` does."""
    for knob in chosen:
        mildest = bisect.bisect_left(
            range(chosen[knob]), True, key=lambda option: works({**chosen, knob: option})
        )
        chosen = {**chosen, knob: mildest}
    return chosen


def cannot_fit(case: Case, facts: ActivationFacts) -> bool:
    """Whether no placement can hold the case, which takes no plan to see: its states, in their
    smallest formats, are more than all places together, or one pass works on more than the place
    where the model computes. False decides nothing."""
    hardware, config = case.hardware, case.config
    there = (hardware.device_nbytes, hardware.host_nbytes, hardware.nvme_free_nbytes)
    working = facts.peak_nbytes
    if config.placement.activations.tier != "device":
        working = min(working, facts.peak_elsewhere_nbytes)
    numel = 1 << 24  # of so many, the gaps between arrays are next to nothing
    record = min(kept.nbytes(numel) for kept in record_formats(config).values()) / numel
    gradient = 4 if config.sums_gradients else ITEMSIZE[config.precision]
    weights = sum(least_nbytes(group, ITEMSIZE[config.precision]) for group in case.shape.groups)
    states = int(weights + case.shape.numel_trainable * (gradient + record))
    compute = hardware.device_nbytes or hardware.host_nbytes
    return working > compute or states // case.sharding.ranks + working > sum(there)
