"""The divisors of a number, in time that grows with its root: a user may have mistyped it."""

from __future__ import annotations

import math


def divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    large = [number // n for n in reversed(small) if n * n != number]
    return small + large
