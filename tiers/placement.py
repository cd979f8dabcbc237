"""The placement of a class of state: where it *should* live, in one tier or split over several."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from offload.tiers.tier import TIERS, Tier

_PARTS = 1_000_000  # a share is a whole number of these: sums stay exact


@dataclass(frozen=True, slots=True)
class Placement:
    """Fractions per tier, fastest first, summing to 1. One tier: `Placement.on(Tier.HOST)`.

    However it was written, equal shares make equal placements: in the tiers' order, without zeros.
    """

    shares: tuple[tuple[Tier, float], ...]

    def __post_init__(self) -> None:
        total = sum(share for _, share in self.shares)
        if not self.shares or abs(total - 1) > 1e-6 or any(share < 0 for _, share in self.shares):
            raise ValueError(f"placement shares must be >= 0 and sum to 1, got {self.shares}")
        given = dict(self.shares)
        ordered = tuple((tier, given[tier]) for tier in TIERS if given.get(tier, 0.0) > 0)
        object.__setattr__(self, "shares", ordered)

    @classmethod
    def on(cls, tier: Tier) -> Placement:
        return cls(((tier, 1.0),))

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return tuple(tier for tier, _ in self.shares)

    def assign(self, sizes: Sequence[int], *, device_first: bool = False) -> list[Tier]:
        """A tier for each piece, so that every tier's bytes follow its share as they go along. With
        `device_first` the device's share is the first pieces, and the others follow their shares.

        Pieces alternate rather than forming blocks: all links are then busy all the time (the
        ratio idea of ZeRO-Infinity's partial offload). Deterministic; the error against the exact
        split is less than the largest piece per tier. Equal pieces repeat their pattern, and
        hundreds of thousands of them (a large model's chunks) take milliseconds.
        """
        tiers = self.tiers
        if len(tiers) == 1:
            return [tiers[0]] * len(sizes)
        if device_first and tiers[0].on_device:
            (_, share), *others = self.shares
            ends = list(itertools.accumulate(sizes))
            count = bisect.bisect_right(ends, round(share * _PARTS) * sum(sizes) // _PARTS)
            behind_it = Placement(tuple((tier, part / (1 - share)) for tier, part in others))
            return [tiers[0]] * count + behind_it.assign(sizes[count:])
        weights = [round(share * _PARTS) for _, share in self.shares]
        weights[0] += _PARTS - sum(weights)
        behind = [0] * len(tiers)  # bytes x _PARTS that a tier has less than its share
        period = _PARTS // math.gcd(*weights)
        assigned: list[Tier] = []
        for size, run in itertools.groupby(sizes):
            count = len(list(run))
            before, dealt = tuple(behind), _deal(size, min(count, period), weights, behind)
            repeats = 1
            if count > period and tuple(behind) == before:  # the same over and over
                repeats = count // period
            assigned += [tiers[index] for index in dealt] * repeats
            rest = count - repeats * len(dealt)
            assigned += [tiers[index] for index in _deal(size, rest, weights, behind)]
        return assigned

    def describe(self) -> str:
        """`host`, or `host 40% + nvme 60%`."""
        if len(self.tiers) == 1:
            return str(self.tiers[0])
        return " + ".join(f"{tier} {100 * share:.3g}%" for tier, share in self.shares)


def _deal(size: int, count: int, weights: Sequence[int], behind: list[int]) -> list[int]:
    """The index of the tier of each of `count` equal pieces; updates `behind`."""
    dealt = []
    shares = [size * weight for weight in weights]
    for _ in range(count):
        furthest = 0
        for index, share in enumerate(shares):
            behind[index] += share
            if behind[index] > behind[furthest]:
                furthest = index
        behind[furthest] -= size * _PARTS
        dealt.append(furthest)
    return dealt
