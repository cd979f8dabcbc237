"""The order in which groups are used, learnt on the first step and tolerant of change afterwards.

One cycle is what happens between two optimizer steps. A use that the trace did not expect moves
the cursor to the nearest later match, and the stretch is recorded anew for the next cycle; where
there is no match, a table of successors (who followed this group last time) predicts instead, so
that changing control flow and mixtures of experts cost a few misses and never the whole trace.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator


class Trace:
    """Uses of groups, named by small integers. Not thread-safe."""

    def __init__(self) -> None:
        self._expected: list[int] = []  # the last complete cycle
        self._positions: dict[int, list[int]] = {}  # group -> where it stands in `_expected`
        self._recorded: list[int] = []  # this cycle so far
        self._successors: dict[int, int] = {}
        self._cursor = 0  # next expected position
        self._on_trace = True
        self.hits = 0
        self.misses = 0

    @property
    def learnt(self) -> bool:
        return bool(self._expected)

    def use(self, group: int) -> bool:
        """Record that `group` is used now. False for a repeat in a row, which counts once."""
        if self._recorded:
            if self._recorded[-1] == group:
                return False
            self._successors[self._recorded[-1]] = group
        self._recorded.append(group)
        if self._expected:
            self._follow(group)
        return True

    def _follow(self, group: int) -> None:
        position = self._next_position(group)
        self._on_trace = position is not None
        if position is None:
            self.misses += 1
            return
        self.hits += position == self._cursor
        self.misses += position != self._cursor
        self._cursor = position + 1

    def _next_position(self, group: int) -> int | None:
        """Where `group` stands next in this cycle, at or after the cursor."""
        positions = self._positions.get(group, [])
        index = bisect.bisect_left(positions, self._cursor)
        return positions[index] if index < len(positions) else None

    def end_cycle(self) -> None:
        """What was recorded is what the next cycle is expected to be."""
        if not self._recorded:
            return
        self._expected = self._recorded
        self._recorded = []
        self._positions = {}
        for position, group in enumerate(self._expected):
            self._positions.setdefault(group, []).append(position)
        self._cursor = 0
        self._on_trace = True

    def upcoming(self) -> Iterator[int]:
        """Groups in the order of their expected use, at most one cycle long."""
        if not self._on_trace and self._recorded:
            yield from self._by_successors(self._recorded[-1])
            return
        yield from self._expected[self._cursor :]
        yield from self._expected[: self._cursor]

    def _by_successors(self, group: int) -> Iterator[int]:
        seen = {group}
        while (following := self._successors.get(group)) is not None and following not in seen:
            yield following
            seen.add(following)
            group = following

    def next_use(self, group: int) -> float:
        """Uses until `group` is expected again; infinity if it never was."""
        position = self._next_position(group)
        if position is not None:
            return position - self._cursor
        return self.next_cycle_use(group)

    def next_cycle_use(self, group: int) -> float:
        """Uses until `group` is expected for the first time in the next cycle."""
        positions = self._positions.get(group)
        if not positions:
            return math.inf
        return len(self._expected) - self._cursor + positions[0]

    def first_uses(self) -> list[int]:
        """Groups in the order of their first use in the cycle being recorded."""
        return list(dict.fromkeys(self._recorded))
