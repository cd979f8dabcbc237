"""Explains where each class of state is: the tier it does not fit, and the cost of moving it."""

from __future__ import annotations

from offload.planning.choice.solver import Solution
from offload.planning.plan.plan import Plan, home_nbytes, needed_nbytes
from offload.planning.plan.sizes import PlacedClass
from offload.tiers.placement import Placement
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes

_FASTER = {Tier.HOST: Tier.DEVICE, Tier.NVME: Tier.HOST}


def reasons(solution: Solution) -> dict[PlacedClass, str]:
    """Return a sentence for each class."""
    return {
        state_class: _reason(solution, state_class, placement)
        if f"placement.{state_class}" in solution.open_keys
        else "as the configuration says"
        for state_class, placement in solution.best.plan.placements.items()
    }


def _reason(solution: Solution, state_class: PlacedClass, placement: Placement) -> str:
    plan = solution.best.plan
    slowest = placement.tiers[-1]
    above = _FASTER.get(slowest)
    if above is None or (above is Tier.DEVICE and not plan.gpu):
        return f"fits into {slowest}: nothing has to move"
    missing = _missing(plan, state_class, slowest, above)
    fitting = [other for other in solution.best.elsewhere(state_class) if other.fits]
    other = min(fitting, key=lambda other: other.seconds, default=None)
    parts = [
        f"{format_bytes(missing)} more of {above} would hold it all" if missing > 0
        else f"{above} has room, but a step would not be faster"
    ]  # fmt: skip
    if other is not None and other.step is not None:
        slower = other.seconds / solution.best.seconds - 1
        where = other.plan.placements[state_class].describe()
        parts.append(f"on {where} a step takes {slower:+.1%}")
    return "; ".join(parts)


def _missing(plan: Plan, state_class: PlacedClass, tier: Tier, above: Tier) -> int:
    """Bytes that the tier above lacks to hold the part of the class that is in `tier`."""
    left = plan.room_nbytes(above) - needed_nbytes(plan, above)
    return home_nbytes(plan, state_class, tier) - left
