"""Where a class of state *should* live: its home, or how it is split over several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.tiers.extent import TierName


@dataclass(frozen=True, slots=True)
class Placement:
    """Fractions per tier, fastest first, summing to 1. One tier: `Placement.on(TierName.HOST)`."""

    shares: tuple[tuple[TierName, float], ...]

    def __post_init__(self) -> None:
        total = sum(share for _, share in self.shares)
        if not self.shares or abs(total - 1) > 1e-6 or any(share < 0 for _, share in self.shares):
            raise ValueError(f"placement shares must be >= 0 and sum to 1, got {self.shares}")

    @classmethod
    def on(cls, tier: TierName) -> Placement:
        return cls(((tier, 1.0),))

    @property
    def tiers(self) -> tuple[TierName, ...]:
        return tuple(tier for tier, share in self.shares if share > 0)

    def assign(self, sizes: Sequence[int]) -> list[TierName]:
        """A tier for each piece, so that every tier's bytes follow its share as they go along.

        Pieces alternate rather than forming blocks: all links are then busy all the time (the
        ratio idea of ZeRO-Infinity's partial offload). Deterministic; the error against the exact
        split is less than the largest piece per tier.
        """
        if len(self.tiers) == 1:
            return [self.tiers[0]] * len(sizes)
        given = dict.fromkeys(self.tiers, 0)
        return list(self._assign(sizes, given))

    def _assign(self, sizes: Sequence[int], given: dict[TierName, int]) -> Iterator[TierName]:
        fractions = {tier: share for tier, share in self.shares if share > 0}
        total = 0
        for size in sizes:
            total += size
            # the tier that is furthest behind what it should hold by now
            tier = max(given, key=lambda name: fractions[name] * total - given[name])
            given[tier] += size
            yield tier

    def describe(self) -> str:
        """`host`, or `host 40% + nvme 60%`."""
        if len(self.tiers) == 1:
            return str(self.tiers[0])
        return " + ".join(f"{tier} {share:.0%}" for tier, share in self.shares if share > 0)
