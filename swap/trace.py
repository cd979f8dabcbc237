"""The order in which groups are used, learnt on the first step and tolerant of change afterwards.

One cycle is what happens between two optimizer steps. A use that the trace did not expect moves
the cursor to the nearest later match, and the stretch is recorded anew for the next cycle; where
there is no match, a table of successors (who followed this group last time) predicts instead, so
that changing control flow and mixtures of experts cost a few misses and never the whole trace.

A forward that no backward pass follows (an evaluation, inference) is a cycle of its own, expected
until the next backward pass, and leaves no trace in that of the steps:

    used       f b ┊ f b ┊ f    f    f    f b ┊ f b
    expected   - - ┊ f b ┊ f b  f    f    f b ┊ f b
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator

# A cycle this long is over: parts of a model may be called for ever, with no forward of the whole.
LONGEST_CYCLE = 1 << 14


class _Cycle:
    """Groups in the order of their use, and where forwards of the whole model began."""

    def __init__(self, uses: list[int], forwards: list[int]) -> None:
        self.uses = uses
        self._forwards = forwards
        self._positions: dict[int, list[int]] = {}
        for position, group in enumerate(uses):
            self._positions.setdefault(group, []).append(position)

    def next_position(self, group: int, start: int) -> int | None:
        """Where `group` stands next, at or after `start`."""
        positions = self._positions.get(group, [])
        index = bisect.bisect_left(positions, start)
        return positions[index] if index < len(positions) else None

    def pass_from(self, start: int) -> list[int]:
        """The uses from `start` on, before the next forward begins."""
        index = bisect.bisect_left(self._forwards, start)
        stop = self._forwards[index] if index < len(self._forwards) else len(self.uses)
        return self.uses[start:stop]


class Trace:
    """The uses of groups (named by small integers) in one cycle, and those expected next. Not
    thread-safe."""

    def __init__(self) -> None:
        self._steps = _Cycle([], [])  # the last complete cycle that ended with a step
        self._expected = self._steps  # that, or the last forward without a backward pass
        self._recorded: list[int] = []  # this cycle so far
        self._forwards: list[int] = []  # where in it forwards began
        self._forward_start = 0  # of the last forward, in `_recorded`
        self._backward_start = 0
        self._turn: int | None = None  # used last in that forward and first in its backward
        self._in_backward = False  # a backward pass has come since
        self._last: int | None = None
        self._successors: dict[int, int] = {}
        self._cursor = 0  # next expected position
        self._on_trace = True
        self.hits = 0
        self.misses = 0

    @property
    def learnt(self) -> bool:
        return bool(self._expected.uses)

    @property
    def cursor(self) -> int:
        """The next expected position in this cycle: what `next_use` counts from."""
        return self._cursor

    def use(self, group: int, *, backward: bool = False) -> bool:
        """Record that `group` is used now, in a backward pass or not. False for a repeat in a row,
        which counts once."""
        if backward and not self._in_backward:
            self._begin_backward()
            self._turn = group if self._last == group else None
        if self._last == group:
            return False
        if self._last is not None and self._forwards[-1:] != [len(self._recorded)]:
            self._successors[self._last] = group  # of the same pass
        if len(self._recorded) >= LONGEST_CYCLE:
            self.end_cycle()
        self._last = group
        self._recorded.append(group)
        if self.learnt:
            self._follow(group)
        return True

    def repeats(self, group: int, *, backward: bool) -> bool:
        """Whether `use` would count nothing: the group was used last, in this pass."""
        return self._last == group and (self._in_backward or not backward)

    def _follow(self, group: int) -> None:
        position = self._expected.next_position(group, self._cursor)
        self._on_trace = position is not None
        if position is None:
            self.misses += 1
            return
        self.hits += position == self._cursor
        self.misses += position != self._cursor
        self._cursor = position + 1

    # ---------------------------------------------------------------- cycles
    def begin_forward(self) -> None:
        """The whole model is called. If no backward pass followed the last time, none is expected
        now."""
        alone = self._recorded[self._forward_start :]
        if alone and not self._in_backward:
            del self._recorded[self._forward_start :]
            self._last = None
            self._expect(_Cycle(alone, []))
            self._forwards = [start for start in self._forwards if start < self._forward_start]
        self._forward_start = len(self._recorded)
        self._forwards.append(self._forward_start)
        self._in_backward = False

    def _begin_backward(self) -> None:
        """This cycle will end with a step: expect what such a cycle has after what is recorded."""
        self._in_backward = True
        self._backward_start = len(self._recorded)
        if self._expected is self._steps:
            return
        self._expect(self._steps)
        for group in self._recorded:
            position = self._steps.next_position(group, self._cursor)
            self._cursor = self._cursor if position is None else position + 1

    def end_cycle(self) -> None:
        """A step: what was recorded is what the next cycle is expected to be."""
        if not self._recorded:
            return
        self._steps = _Cycle(self._recorded, self._forwards)
        self._recorded, self._forwards = [], []
        self._forward_start = 0
        self._in_backward = False
        self._last = None
        self._expect(self._steps)

    def _expect(self, cycle: _Cycle) -> None:
        """`cycle` begins."""
        self._expected = cycle
        self._cursor = 0
        self._on_trace = True

    # ---------------------------------------------------------------- predictions
    def upcoming(self) -> Iterator[int]:
        """Groups in the order of their expected use, at most one cycle long."""
        if not self._on_trace and self._last is not None:
            yield from self._by_successors(self._last)
            return
        uses, start = self._expected.uses, self._cursor
        for distance in range(len(uses)):
            yield uses[(start + distance) % len(uses)]

    def ahead(self, count: int) -> list[tuple[int, float]]:
        """The groups of the next `count` uses, as `upcoming` has them, once each, and the uses
        until then."""
        if not self._on_trace and self._last is not None:
            found = itertools.islice(self._by_successors(self._last), count)
            return [(group, self.next_use(group)) for group in found]
        uses, start = self._expected.uses, self._cursor
        distances: dict[int, float] = {}
        for distance in range(min(count, len(uses))):
            distances.setdefault(uses[(start + distance) % len(uses)], distance)
        return list(distances.items())

    def rest(self) -> Iterator[int]:
        """As `upcoming`, but for what comes after this pass of the model: a step may have changed
        what is used then."""
        if not self._on_trace and self._last is not None:
            yield from self._by_successors(self._last)
            return
        yield from self._expected.pass_from(self._cursor)

    def is_over(self, group: int) -> bool:
        """Whether this pass, which is in its backward, is expected not to use the group again: as
        the last step did, or as often as its forward did."""
        if self.learnt and self._on_trace:
            return group not in self._expected.pass_from(self._cursor)
        forward = self._recorded[self._forward_start : self._backward_start]
        done = self._recorded[self._backward_start :].count(group) + (group == self._turn)
        return done >= forward.count(group)

    def _by_successors(self, group: int) -> Iterator[int]:
        seen = {group}
        while (following := self._successors.get(group)) is not None and following not in seen:
            yield following
            seen.add(following)
            group = following

    def next_use(self, group: int) -> float:
        """Uses until `group` is expected again; infinity if it never was."""
        position = self._expected.next_position(group, self._cursor)
        if position is not None:
            return position - self._cursor
        return self.next_cycle_use(group)

    def next_cycle_use(self, group: int) -> float:
        """Uses until `group` is expected for the first time in the next cycle."""
        first = self._expected.next_position(group, 0)
        if first is None:
            return math.inf
        return len(self._expected.uses) - self._cursor + first

    def first_uses(self) -> list[int]:
        """Groups in the order of their first use in the cycle being recorded."""
        return list(dict.fromkeys(self._recorded))
