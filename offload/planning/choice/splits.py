"""Splits of a class of state over tiers, fastest first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from offload.tiers.placement import Placement
from offload.tiers.tier import Tier


def share_of(placement: Placement, tier: Tier) -> float:
    return dict(placement.shares).get(tier, 0.0)


def neighbours(placement: Placement, tiers: Sequence[Tier], step: float) -> Iterator[Placement]:
    """Placements with a share `step` of the class in another tier."""
    for one, other in itertools.combinations(tiers, 2):
        for move in (step, -step):
            moved = shifted(placement, one, other, move)
            if moved is not None:
                yield moved


def shifted(placement: Placement, to: Tier, source: Tier, move: float) -> Placement | None:
    """Move a share `move` of the class from `source` to `to`; None if there is not so much."""
    shares = {tier: share_of(placement, tier) for tier in Tier}
    shares[to] = round(shares[to] + move, 6)
    shares[source] = round(shares[source] - move, 6)
    if min(shares.values()) < 0 or max(shares.values()) > 1:
        return None
    return Placement(tuple((tier, share) for tier, share in shares.items() if share))
