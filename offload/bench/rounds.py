"""Who is measured when: every system once per round, each round beginning with another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")
Say = Callable[[str], None]


def interleaved(
    systems: Mapping[str, Callable[[], T]], rounds: int, say: Say, *, warmup: int = 1
) -> dict[str, list[T]]:
    """What each system returned in each round, the first `warmup` rounds left out.

        round 0   a b c        round 1   b c a        round 2   c a b        ...

    Nobody always runs after the same neighbour, whose heat, caches and dirty pages it inherits.
    """
    names = list(systems)
    results: dict[str, list[T]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        shift = number % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            say(f"{'warming up' if number < 0 else f'round {number + 1} of {rounds}'}: {name}")
            value = systems[name]()
            if number >= 0:
                results[name].append(value)
    return results


def seconds_of(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
