"""What would make a case fit: the smallest sets of changes, each tried by planning anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from offload.config import OffloadConfig
from offload.planning.plan.estimate import Change, Estimate
from offload.tiers.errors import UnsupportedError
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.estimate.estimator import Estimator
from offload.tools.memest.estimate.knobs import Option, knobs
from offload.tools.memest.estimate.lower_bound import cannot_fit
from offload.tools.memest.estimate.minimal_sets import minimal_sets

MOST_SHOWN = 5
_ENOUGH = 3  # with so many ways, larger sets of changes are not looked for
_MOST_TRIES, _MOST_TRIES_ENORMOUS = 30, 14
_ENORMOUS_NUMEL = 20 * 10**9
_LARGE_CHUNK_NUMEL = 1 << 22


def changes(case: Case, now: Estimate, estimator: Estimator) -> tuple[Change, ...]:
    """Minimal sets that fit, those of fewer changes first, then by time per step."""

    def fits(options: tuple[Option, ...]) -> bool:
        """With all of them, where the configuration allows them at all."""
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
    """The case with all of them; None where the configuration refuses them together.

    What leaves recomputation open fits if it fits with all of it: so its step is one that is sure
    to fit, if not the fastest. Of an enormous model that leaves its chunks open, large ones: they
    are planned one by one.
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
