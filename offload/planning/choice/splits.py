"""How a class of state may be split over tiers: rows of shares over (device, host, nvme)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from offload.tiers.extent import TierName
from offload.tiers.placement import Placement

TIERS = (TierName.DEVICE, TierName.HOST, TierName.NVME)
Shares = tuple[float, float, float]


def placement_of(shares: Shares) -> Placement:
    return Placement(
        tuple((tier, share) for tier, share in zip(TIERS, shares, strict=True) if share)
    )


def shares_of(placement: Placement) -> Shares:
    given = dict(placement.shares)
    return (
        given.get(TierName.DEVICE, 0.0), given.get(TierName.HOST, 0.0),
        given.get(TierName.NVME, 0.0),
    )  # fmt: skip


def neighbours(placement: Placement, tiers: Sequence[TierName], step: float) -> Iterator[Placement]:
    """Placements with `step` of the class in another tier."""
    for a, b in itertools.combinations([TIERS.index(tier) for tier in tiers], 2):
        for move in (step, -step):
            row = shifted(shares_of(placement), a, b, move)
            if row is not None:
                yield placement_of(row)


def shifted(shares: Shares, a: int, b: int, move: float) -> Shares | None:
    """`move` of the class taken from `b` to `a`; None where that is more than there is."""
    row = list(shares)
    row[a] = round(row[a] + move, 6)
    row[b] = round(row[b] - move, 6)
    if min(row) < 0 or max(row) > 1:
        return None
    return row[0], row[1], row[2]
