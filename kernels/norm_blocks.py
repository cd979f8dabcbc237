"""The blocks of a gradient's norm, which is the sum of partial sums of squares."""

from __future__ import annotations

NORM_BLOCK = 65536  # elements per partial sum of squares


def norm_blocks(numel: int) -> int:
    """The number of partials of an array of `numel` elements."""
    return -(-numel // NORM_BLOCK)
