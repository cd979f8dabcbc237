"""How a gradient's norm is cut into partial sums of squares."""

from __future__ import annotations

NORM_BLOCK = 65536  # elements per partial sum of squares


def norm_blocks(numel: int) -> int:
    """How many partials an array of `numel` elements has."""
    return -(-numel // NORM_BLOCK)
