"""What would make a case fit: the smallest sets of changes, each tried by planning anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from offload.planning.estimate import Change
from offload.tools.memest.case import Case, Verdict
from offload.tools.memest.knobs import Rung, knobs
from offload.tools.memest.minimal_sets import minimal_sets

Judge = Callable[[Case], Verdict]

MOST_SHOWN = 6
_ENOUGH = 3  # with so many ways, larger sets of changes are not looked for
_MOST_TRIES = 60


def changes(case: Case, verdict: Verdict, judge: Judge) -> tuple[Change, ...]:
    """Minimal sets that fit, those of fewer changes first, then by time per step.

    `judge` is asked for each; at most 60 times.
    """
    verdicts: dict[tuple[int, ...], Verdict | None] = {}

    def tried(rungs: tuple[Rung, ...]) -> Verdict | None:
        key = tuple(map(id, rungs))
        if key not in verdicts:
            changed = applied(case, rungs)
            verdicts[key] = None if changed is None else judge(changed)
        return verdicts[key]

    def works(rungs: tuple[Rung, ...]) -> bool:
        found = tried(rungs)
        return found is not None and found.fits

    sets = minimal_sets(knobs(case, verdict), works, most_tries=_MOST_TRIES, enough=_ENOUGH)
    found = [(len(rungs), _change(rungs, verdict, tried(rungs))) for rungs in sets]
    found.sort(key=lambda pair: (pair[0], pair[1].step_factor or float("inf")))
    return tuple(change for _, change in found[:MOST_SHOWN])


def applied(case: Case, rungs: tuple[Rung, ...]) -> Case | None:
    """The case with all of them; None if the configuration refuses the combination."""
    changed: Case | None = case
    for rung in rungs:
        changed = rung.apply(changed) if changed is not None else None
    return changed


def _change(rungs: tuple[Rung, ...], before: Verdict, after: Verdict | None) -> Change:
    settings: Mapping[str, str] = {k: v for rung in rungs for k, v in rung.settings.items()}
    text = "; ".join(rung.text for rung in rungs)
    if before.step is None or after is None or after.step is None:
        return Change(settings, text)
    return Change(settings, text, after.step.seconds / before.step.seconds)
