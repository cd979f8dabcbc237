"""The location of some bytes: `(tier, offset_bytes, nbytes)`, and for files the path."""

from __future__ import annotations

from dataclasses import dataclass

from offload.tiers.tier import Tier

PAGE_NBYTES = 4096  # alignment of every extent: O_DIRECT and huge pages are content with it


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of one tier. `offset_bytes` and `nbytes` are multiples of `PAGE_NBYTES`.

    `path_index` says which of a file tier's paths holds it (0 for memory tiers).
    """

    tier: Tier
    offset_bytes: int
    nbytes: int
    path_index: int = 0
