"""Generates placements worth comparing, by asking how many bytes each tier would hold.

    filled    everything in the slowest tier, then raised class by class: whole, or the largest
              share that the faster tier holds; in every order of the classes, and once more
              without nvme, which costs buffers and windows in memory as soon as anything is there
    near      others than a known one, with less of one class on the device, and more of another:
              what is free there holds copies of weights

Shares are whole per cents. The search is deterministic, in the order of classes and tiers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from offload.planning.plan.sizes import CLASSES, Placements
from offload.tiers.ledger import StateClass
from offload.tiers.placement import Placement
from offload.tiers.tier import TIERS, Tier

# Of classes that the configuration does not name, fastest first.
OpenTiers = Mapping[StateClass, tuple[Tier, ...]]
# Bytes that a tier lacks under a placement; what it has to spare is negative.
Lacking = Callable[[Placements, Tier], int]


def share_of(placement: Placement, tier: Tier) -> float:
    return dict(placement.shares).get(tier, 0.0)


def shifted(placement: Placement, to: Tier, source: Tier, move: float) -> Placement:
    """Move a share `move` of the class from `source`, which has that much, to `to`."""
    shares = {tier: share_of(placement, tier) for tier in TIERS}
    shares[to] = round(shares[to] + move, 6)
    shares[source] = round(shares[source] - move, 6)
    return Placement(tuple((tier, share) for tier, share in shares.items() if share))


def filled(
    named: Placements, open_tiers: OpenTiers, lacking: Lacking, min_percent: int
) -> Iterator[Placements]:
    """Placements filled tier by tier, possibly repeated. `min_percent`: what is worth a split."""
    without = {c: without_files(tiers) for c, tiers in open_tiers.items()}
    for tiers_of in (open_tiers, without) if without != open_tiers else (open_tiers,):
        lowest = {c: Placement.on(tiers[-1]) for c, tiers in tiers_of.items()}
        for order in itertools.permutations(each for each in CLASSES if each in tiers_of):
            placements: Placements = {**named, **lowest}
            for tier, placed in itertools.product(TIERS, order):
                if tier in open_tiers[placed][:-1]:
                    placements = _raised(placements, placed, tier, lacking, min_percent)
            yield placements


def near(
    placements: Placements, open_tiers: OpenTiers, lacking: Lacking, percent: int
) -> Iterator[Placements]:
    """Placements with up to `percent` more of one class on the device; or that much less, and as
    much as then fits of another one, or of none."""
    there = [c for c, tiers in open_tiers.items() if tiers[0].on_device and len(tiers) > 1]
    for placed in there:
        here, (device, *below) = placements[placed], open_tiers[placed]
        yield _raised(placements, placed, device, lacking, 1, percent)
        move = min(percent / 100, share_of(here, device))
        if move:
            to = next((each for each in reversed(below) if share_of(here, each)), below[0])
            lowered = {**placements, placed: shifted(here, to, device, move)}
            yield lowered
            for more in there:
                if more is not placed:
                    yield _raised(lowered, more, device, lacking, 1)


def _raised(
    placements: Placements, placed: StateClass, tier: Tier, lacking: Lacking, min_percent: int,
    most_percent: int = 100,
) -> Placements:  # fmt: skip
    """Raise as much of the class as fits into `tier`, from the slowest tier with some of it."""
    here = placements[placed]
    source = next((each for each in reversed(tier.slower) if share_of(here, each)), None)
    if source is None:
        return placements
    above = tier.faster
    before = [max(0, lacking(placements, each)) for each in above]

    def moved(percent: int) -> Placements:
        return {**placements, placed: shifted(here, tier, source, percent / 100)}

    def lacks(percent: int) -> int:
        """Bytes that the tier, or additionally tiers above, lack: pieces are dealt out anew."""
        raised = moved(percent)
        more = sum(
            max(0, lacking(raised, each) - nbytes)
            for each, nbytes in zip(above, before, strict=True)
        )
        own = lacking(raised, tier)
        return max(own, more) if more else own

    max_percent = min(round(100 * share_of(here, source)), most_percent)
    percent = _largest(max_percent, lacks)
    return moved(percent) if percent >= min(min_percent, max_percent) else placements


def without_files(tiers: Sequence[Tier]) -> tuple[Tier, ...]:
    """The tiers that are memory; all of them if none is."""
    return tuple(tier for tier in tiers if not tier.is_file) or tuple(tiers)


def _largest(max_percent: int, lacking: Callable[[int], int]) -> int:
    """The largest of 0 ... `max_percent` that lacks nothing, or one less; 0 if none does. Bytes are
    nearly linear, so each guess interpolates between spare and missing bytes at the two ends."""
    over = lacking(max_percent)
    if over <= 0:
        return max_percent
    spare = -lacking(0)
    low, high, enough = 0, max_percent, (spare + over) / max_percent
    while high - low > 1 and spare >= (enough if low else 0):
        guess = low + int((high - low) * spare / (spare + over))
        guess = min(max(guess, low + 1), high - 1)
        missing = lacking(guess)
        if missing <= 0:
            low, spare = guess, -missing
        else:
            high, over = guess, missing
    return low
