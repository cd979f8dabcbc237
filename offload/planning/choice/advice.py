"""Advice on making a step faster: the solver tries changes, and those that matter are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from offload.config import OffloadConfig
from offload.planning.choice.run_plan import RunPlan
from offload.planning.choice.solver import Candidate, solve
from offload.planning.machine.speeds import Speeds
from offload.planning.plan.estimate import Change, StepEstimate
from offload.planning.plan.plan import needed_nbytes
from offload.tiers.errors import ConfigError
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes, round_up

MATTERS = 0.05  # of a step's time: less is not worth a line
_SHARES = (0.25, 0.5, 1.0)  # of the memory that could be used
_CORRECTION = (1 / 3, 3.0)  # beyond, it is not the speeds that are wrong


def advise(now: RunPlan) -> list[Change]:
    """Return changes of `now.asked` that each gain at least `MATTERS` alone, the largest gain
    first.

    A budget is raised by the least amount that brings most of the gain of raising it fully.
    """
    gains: dict[str, Change] = {}
    for settings, text in _changes(now):
        best = _solved(now, settings)
        if best is None:
            continue
        factor = best.seconds / now.best.seconds
        key = next(iter(settings))
        before = gains.get(key)
        if not best.fits or factor > 1 - MATTERS:
            continue
        if before is None or before.step_factor is None or factor < before.step_factor - MATTERS:
            percent = round((factor - 1) * 100)
            gains[key] = Change(settings, f"{text}: {percent} % step time", factor)
    return sorted(gains.values(), key=lambda change: change.step_factor or 1.0)


def _changes(now: RunPlan) -> Iterator[tuple[dict[str, str], str]]:
    config, plan = now.asked, now.best.plan
    budget = plan.budgets[Tier.HOST]
    free = int(0.9 * (now.hardware.host_free_nbytes - budget))
    # all that is on disk, in RAM: more would stay empty
    useful = needed_nbytes(plan, Tier.HOST) + plan.total(Tier.NVME) - budget
    for share in _SHARES:
        more = round_up(int(share * min(free, useful)), 1 << 20)
        if more > 0:
            yield {"budget.host": str(budget + more)}, f"raise budget.host by {_short(more)}"
    # of states that tiers keep differently, another place is another result
    named = {
        f"placement.{name}": "auto"
        for name, home in config.placement.homes().items()
        if home is not None and (config.optimizer.states.uniform or not name.endswith("optimizer"))
    }
    if named:
        yield named, "set " + ", ".join(f"{key}: auto" for key in named)
    for checkpoint in ("false", "selective", "true") if plan.trains else ():
        if str(now.best.config.placement.activations.checkpoint).lower() != checkpoint:
            key = "placement.activations.checkpoint"
            yield {key: checkpoint}, f"set {key}: {checkpoint}"


def _solved(now: RunPlan, settings: Mapping[str, str]) -> Candidate | None:
    """Return the best plan after a change, or None if the change contradicts the configuration."""
    overrides = [f"{key}={value}" for key, value in settings.items()]
    try:
        config = OffloadConfig.load(now.asked, overrides)
    except ConfigError:
        return None
    return solve(config, now.model, now.hardware, now.run).best


def _short(nbytes: int) -> str:
    """Format bytes as a budget is written: `6GiB`."""
    return format_bytes(nbytes).replace(" ", "").replace(".0", "")


def corrected(speeds: Speeds, step: StepEstimate, measured_s: float) -> Speeds | None:
    """Scale `speeds` so that the prediction matches the measured time. Return None if the factor is
    too large to be an error of speeds: other programs run, or the time model lacks something.

    All rates are scaled by one factor, since one number cannot tell which of them was wrong. Rates
    measured alone are thereby corrected to what this run achieves.
    """
    factor = step.seconds / measured_s
    if not _CORRECTION[0] <= factor <= _CORRECTION[1]:
        return None
    return speeds.times(factor)
