"""What would make a case fit: the smallest sets of changes, each tried by planning anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from offload.config import OffloadConfig
from offload.planning.activations.facts import ActivationFacts
from offload.planning.plan.estimate import Change
from offload.tiers.errors import UnsupportedError
from offload.tools.memest.case import Case, Verdict
from offload.tools.memest.knobs import Rung, knobs
from offload.tools.memest.least import hopeless
from offload.tools.memest.minimal_sets import minimal_sets

MOST_SHOWN = 5
_ENOUGH = 3  # with so many ways, larger sets of changes are not looked for
_MOST_TRIES, _MOST_TRIES_ENORMOUS = 30, 14
_ENORMOUS_NUMEL = 20 * 10**9
_LARGE_CHUNK_NUMEL = 1 << 22


class Judging(Protocol):
    """How a case is judged."""

    def __call__(self, case: Case) -> Verdict:
        """The best that can be said of it."""

    def fits(self, case: Case) -> bool:
        """Only whether it can fit."""

    def facts(self, case: Case, config: OffloadConfig) -> ActivationFacts:
        """What one pass takes."""


def changes(case: Case, verdict: Verdict, judge: Judging) -> tuple[Change, ...]:
    """Minimal sets that fit, those of fewer changes first, then by time per step."""
    search = _Search(case, judge)
    tries = _MOST_TRIES_ENORMOUS if _is_enormous(case) else _MOST_TRIES
    sets = minimal_sets(knobs(case, verdict), search.fits, most_tries=tries, enough=_ENOUGH)
    found: list[tuple[int, Change]] = []
    for rungs in sets:
        if len(found) == MOST_SHOWN:
            break
        after = judge(search.tried[_key(rungs)])
        if after.fits:
            found.append((len(rungs), _change(rungs, verdict, after)))
    found.sort(key=lambda pair: (pair[0], pair[1].step_factor or float("inf")))
    return tuple(change for _, change in found)


@dataclass
class _Search:
    """Tries sets of rungs; remembers what was tried."""

    case: Case
    judge: Judging
    tried: dict[tuple[int, ...], Case] = field(default_factory=dict)

    def fits(self, rungs: tuple[Rung, ...]) -> bool:
        """Whether the case fits with all of them, where the configuration allows them at all."""
        changed = applied(self.case, rungs)
        if changed is None:
            return False
        tried = self.tried[_key(rungs)] = _with_few_chunks(_recomputing(changed))
        try:
            facts = self.judge.facts(tried, tried.config)
            return not hopeless(tried, facts) and self.judge.fits(tried)
        except UnsupportedError:  # a batch of 2 in 4 pieces
            return False


def applied(case: Case, rungs: tuple[Rung, ...]) -> Case | None:
    """The case with all of them; None if the configuration refuses the combination."""
    changed: Case | None = case
    for rung in rungs:
        changed = rung.apply(changed) if changed is not None else None
    return changed


def _recomputing(case: Case) -> Case:
    """What leaves recomputation open fits if it fits with all of it; judged so its step is one
    that is sure to fit, if not the fastest."""
    if case.config.placement.activations.checkpoint != "auto":
        return case
    config = OffloadConfig.load(case.config, ["placement.activations.checkpoint=true"])
    return replace(case, config=config)


def _with_few_chunks(case: Case) -> Case:
    """Of an enormous model that leaves its chunks open, large ones: they are planned one by one."""
    if case.config.optimizer.chunk != "auto" or not _is_enormous(case):
        return case
    config = OffloadConfig.load(case.config, [f"optimizer.chunk={_LARGE_CHUNK_NUMEL}"])
    return replace(case, config=config)


def _is_enormous(case: Case) -> bool:
    return case.source.shape.numel // case.profile.ranks >= _ENORMOUS_NUMEL


def _key(rungs: tuple[Rung, ...]) -> tuple[int, ...]:
    return tuple(map(id, rungs))


def _change(rungs: tuple[Rung, ...], before: Verdict, after: Verdict) -> Change:
    settings: Mapping[str, str] = {k: v for rung in rungs for k, v in rung.settings.items()}
    text = "; ".join(rung.text for rung in rungs)
    if before.step is None or after.step is None:
        return Change(settings, text)
    return Change(settings, text, after.step.seconds / before.step.seconds)
