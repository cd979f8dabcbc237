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


def compositions(parts: int, tiers: int) -> list[tuple[int, ...]]:
    """All ways to deal `parts` out to `tiers`, most to the first at first."""
    if tiers == 1:
        return [(parts,)]
    return [
        (first, *rest)
        for first in range(parts, -1, -1)
        for rest in compositions(parts - first, tiers - 1)
    ]


def row_of(tiers: Sequence[TierName], shares: Sequence[float]) -> Shares:
    given = dict(zip(tiers, shares, strict=True))
    device, host = (round(given.get(tier, 0.0), 6) for tier in TIERS[:2])
    if TierName.NVME in given:
        return device, host, max(0.0, round(1 - device - host, 6))
    if TierName.HOST in given:
        return device, round(1 - device, 6), 0.0
    return 1.0, 0.0, 0.0


def pairs(tiers: Sequence[TierName]) -> list[tuple[int, int]]:
    columns = [TIERS.index(tier) for tier in tiers]
    return list(itertools.combinations(columns, 2))


def neighbours(
    placement: Placement, tiers: Sequence[TierName], step: float, *, up: bool = False
) -> Iterator[Placement]:
    """Placements with `step` of the class in another tier; `up`: in a faster one alone."""
    for a, b in pairs(tiers):
        for move in (step,) if up else (step, -step):
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
