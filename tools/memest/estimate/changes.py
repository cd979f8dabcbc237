"""What would make a case fit: the smallest sets of changes, each tried by planning anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from offload.config import OffloadConfig
from offload.planning.estimate import Change, Estimate
from offload.tiers.errors import UnsupportedError
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.estimate.judge import Judge
from offload.tools.memest.estimate.knobs import Rung, knobs
from offload.tools.memest.estimate.least import hopeless
from offload.tools.memest.estimate.minimal_sets import minimal_sets

MOST_SHOWN = 5
_ENOUGH = 3  # with so many ways, larger sets of changes are not looked for
_MOST_TRIES, _MOST_TRIES_ENORMOUS = 30, 14
_ENORMOUS_NUMEL = 20 * 10**9
_LARGE_CHUNK_NUMEL = 1 << 22


def changes(case: Case, now: Estimate, judge: Judge) -> tuple[Change, ...]:
    """Minimal sets that fit, those of fewer changes first, then by time per step."""
    search = _Search(case, judge)
    tries = _MOST_TRIES_ENORMOUS if _is_enormous(case) else _MOST_TRIES
    ladders = knobs(case, now, judge.facts(case, now.config).peak_at)
    sets = minimal_sets(ladders, search.fits, most_tries=tries, enough=_ENOUGH)
    found: list[tuple[int, Change]] = []
    for rungs in sets:
        if len(found) == MOST_SHOWN:
            break
        after = judge(search.tried[_key(rungs)])
        if after.fits:
            found.append((len(rungs), _change(rungs, now, after)))
    found.sort(key=lambda pair: (pair[0], pair[1].step_factor or float("inf")))
    return tuple(change for _, change in found)


@dataclass
class _Search:
    """Tries sets of rungs; remembers what was tried."""

    case: Case
    judge: Judge
    tried: dict[tuple[int, ...], Case] = field(default_factory=dict)

    def fits(self, rungs: tuple[Rung, ...]) -> bool:
        """Whether the case fits with all of them, where the configuration allows them at all."""
        changed: Case | None = self.case
        for rung in rungs:
            changed = rung.apply(changed) if changed is not None else None
        if changed is None:
            return False
        tried = self.tried[_key(rungs)] = _with_few_chunks(_recomputing(changed))
        try:
            facts = self.judge.facts(tried, tried.config)
            return not hopeless(tried, facts) and self.judge.fits(tried)
        except UnsupportedError:  # a batch of 2 in 4 pieces
            return False


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


def _change(rungs: tuple[Rung, ...], before: Estimate, after: Estimate) -> Change:
    settings: Mapping[str, str] = {k: v for rung in rungs for k, v in rung.settings.items()}
    text = "; ".join(rung.text for rung in rungs)
    if before.step is None or after.step is None:
        return Change(settings, text)
    return Change(settings, text, after.step.seconds / before.step.seconds)
