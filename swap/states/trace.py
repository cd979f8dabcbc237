"""The order in which groups are used, learnt on the first step and tolerant of change afterwards.

One cycle is all uses between two optimizer steps. A use that the trace did not expect moves the
cursor to the nearest later match, and the uses in between are recorded anew for the next cycle;
without a match the cursor stays where it is, so that changing control flow costs a few misses and
never the whole trace. Experts, of which a router chooses some, are no part of that order
(`choices.py`): only the places of their tables are.

A forward without a backward pass after it (an evaluation, inference) is a cycle of its own,
expected until the next backward pass, and does not change the cycle of the steps:

    used       f b ┊ f b ┊ f    f    f    f b ┊ f b
    expected   - - ┊ f b ┊ f b  f    f    f b ┊ f b
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from offload.swap.states.choices import Table

# A cycle this long is over: parts of a model may be called for ever, with no forward of the whole.
LONGEST_CYCLE = 1 << 14


_Place = tuple[int, Table, bool]  # before which use a table stands; in a backward pass or not


def _first_from(positions: Sequence[int], start: int) -> float:
    """The first of sorted `positions` at or after `start`, or infinity."""
    index = bisect.bisect_left(positions, start)
    return positions[index] if index < len(positions) else math.inf


class _Cycle:
    """Groups in the order of their use, with the places where forwards of the whole model began and
    the places of the tables."""

    def __init__(self, uses: list[int], forwards: list[int], places: Iterable[_Place]) -> None:
        self.uses = uses
        self._forwards = forwards
        self._positions: dict[int, list[int]] = {}
        for position, group in enumerate(uses):
            self._positions.setdefault(group, []).append(position)
        self._in_forward: dict[Table, list[int]] = {}
        self._in_backward: dict[Table, list[int]] = {}
        # by position, the tables that a backward pass came to before the use there
        self.backward_at: dict[int, list[Table]] = {}
        self.places = list(dict.fromkeys(places))
        for position, table, backward in self.places:
            way = self._in_backward if backward else self._in_forward
            way.setdefault(table, []).append(position)
            if backward:
                self.backward_at.setdefault(position, []).append(table)

    def next_position(self, group: int, start: int) -> int | None:
        """The next position of `group` at or after `start`; None if there is none."""
        positions = self._positions.get(group, [])
        index = bisect.bisect_left(positions, start)
        return positions[index] if index < len(positions) else None

    def next_forward_place(self, table: Table, start: int) -> float:
        """The first place of the table in a forward pass at or after `start`; infinity if none."""
        return _first_from(self._in_forward.get(table, ()), start)

    def next_backward_place(self, table: Table, start: int, stop: float) -> float:
        """The first place of the table in a backward pass in `[start, stop]`; infinity if none."""
        place = _first_from(self._in_backward.get(table, ()), start)
        return place if place <= stop else math.inf

    def end_of_pass(self, start: int) -> int:
        """The position at which the next forward pass begins, at or after `start`."""
        index = bisect.bisect_left(self._forwards, start)
        return self._forwards[index] if index < len(self._forwards) else len(self.uses)


class Trace:
    """The uses of groups (named by small integers) in one cycle, and those expected next. Not
    thread-safe, but for `next_use` and `next_cycle_use`."""

    def __init__(self) -> None:
        self._steps = _Cycle([], [], [])  # the last complete cycle that ended with a step
        self._expected = self._steps  # that, or the last forward without a backward pass
        self._recorded: list[int] = []  # this cycle so far
        self._forwards: list[int] = []  # where in it forwards began
        self._forward_start = 0  # where the last forward begins in `_recorded`
        self._backward_start = 0
        self._turn: int | None = None  # used last in that forward and first in its backward
        self._in_backward = False  # a backward pass has come since
        self._turning = False  # ... and has used nothing yet that is in no table
        self._last: int | None = None  # in no table
        self._tables: dict[str, Table] = {}
        self._table_of: dict[int, Table] = {}
        self._last_choice: int | None = None
        self._choices: dict[int, int] = {}  # this cycle's, and where each was used first
        self._places: list[_Place] = []  # the tables' places in this cycle so far
        self._forward_choices = self._forward_places = 0  # how many were before the last forward
        self._recomputes = False  # backward uses what was chosen in the order of its forward
        self._cursor = 0  # next expected position
        self._on_trace = True

    @property
    def learnt(self) -> bool:
        return bool(self._expected.uses)

    @property
    def uses_left(self) -> float:
        """Uses until the end of this cycle, as far as that is expected."""
        uses = len(self._expected.uses)
        return uses - self._cursor if uses else math.inf

    def put_in_table(self, item: int, table: str) -> None:
        """Put `item` in a table: a pass uses it only if it chooses it among the table's items."""
        self._table_of[item] = self._tables.setdefault(table, Table())

    def assume(self, uses: Sequence[int]) -> None:
        """Expect the first pass to use these groups in this order. A different order is handled
        like any later change of order."""
        self._expect(_Cycle([group for group, _ in itertools.groupby(uses)], [], []))

    def announce(self, chosen: Iterable[int]) -> None:
        """Record that the model chose these items, and no others of their tables, for use now."""
        if not self._in_backward:
            for table in {self._table_of[item] for item in chosen if item in self._table_of}:
                table.settled_at = self._cursor

    def use(self, group: int, *, backward: bool = False) -> bool:
        """Record that `group` is used now, in a backward pass or not. False for a repeat in a row,
        which counts once."""
        if backward and not self._in_backward:
            self._begin_backward()
        table = self._table_of.get(group)
        if table is not None:
            return self._choose(group, table, backward=backward)
        if self._turning:
            self._turning = False
            self._turn = group if self._last == group else None
        if self._last == group:
            return False
        if len(self._recorded) >= LONGEST_CYCLE:
            self.end_cycle()
        self._last = group
        self._recorded.append(group)
        if self.learnt:
            self._follow(group)
        return True

    def repeats(self, group: int, *, backward: bool) -> bool:
        """Whether `use` would count nothing: the group was used last, in this pass."""
        if group in self._table_of:
            return self._last_choice == group and (self._in_backward or not backward)
        begun = self._in_backward and not self._turning
        return self._last == group and (begun or not backward)

    def _choose(self, item: int, table: Table, *, backward: bool) -> bool:
        if self._last_choice == item:
            return False
        self._last_choice = item
        place = (len(self._recorded), table, backward)
        if self._places[-1:] != [place]:
            self._places.append(place)
        self._choices.setdefault(item, len(self._recorded))
        if not backward:
            table.use(item)
        elif item in table.chosen:
            if len(table.chosen) > 1:
                self._recomputes = item == next(iter(table.chosen))
            del table.chosen[item]
        return True

    def _follow(self, group: int) -> None:
        position = self._expected.next_position(group, self._cursor)
        self._on_trace = position is not None
        if position is not None:
            self._cursor = position + 1

    # ---------------------------------------------------------------- cycles
    def begin_forward(self) -> None:
        """Begin a forward pass of the whole model. If no backward pass followed the last one, none
        is expected now."""
        if len(self._recorded) > self._forward_start and not self._in_backward:
            self._take_out_forward()
        self._forward_start = len(self._recorded)
        self._forwards.append(self._forward_start)
        self._begin_pass()

    def _take_out_forward(self) -> None:
        """Take out the last forward pass, which had no backward pass: it is expected again."""
        start = self._forward_start
        places = self._places[self._forward_places :]
        shifted = [(position - start, table, backward) for position, table, backward in places]
        self._expect(_Cycle(self._recorded[start:], [], shifted))
        del self._recorded[start:], self._places[self._forward_places :]
        while len(self._choices) > self._forward_choices:
            self._choices.popitem()  # the last one that was put in
        self._last = None
        self._forwards = [begun for begun in self._forwards if begun < start]

    def _begin_pass(self) -> None:
        self._in_backward = self._turning = False
        self._last_choice = None
        self._forward_choices, self._forward_places = len(self._choices), len(self._places)
        for table in self._tables.values():
            table.begin_pass()

    def _begin_backward(self) -> None:
        """Begin a backward pass: expect the rest of a cycle that ends with a step."""
        self._in_backward = self._turning = True
        self._turn = self._last_choice = None
        self._backward_start = len(self._recorded)
        if self._expected is self._steps:
            return
        self._expect(self._steps)
        for group in self._recorded:
            position = self._steps.next_position(group, self._cursor)
            self._cursor = self._cursor if position is None else position + 1

    def end_cycle(self) -> None:
        """End the cycle with a step: what was recorded is expected in the next cycle."""
        if not self._recorded:
            return
        self._steps = _Cycle(self._recorded, self._forwards, self._known_places())
        self._recorded, self._forwards, self._places, self._choices = [], [], [], {}
        self._forward_start = 0
        self._last = None
        self._begin_pass()
        self._expect(self._steps)

    def _known_places(self) -> list[_Place]:
        """The places of tables in this cycle. A table without a choice in it keeps its places of
        the cycle before, if the uses are the same."""
        if self._recorded != self._steps.uses:
            return self._places
        seen = {(table, backward) for _, table, backward in self._places}
        return [*self._places, *(place for place in self._steps.places if place[1:] not in seen)]

    def _expect(self, cycle: _Cycle) -> None:
        """Begin `cycle`, whose uses are expected from here on."""
        self._expected = cycle
        self._cursor = 0
        self._on_trace = True

    # ---------------------------------------------------------------- predictions
    def upcoming(self) -> Iterator[int]:
        """Groups in the order of their expected use, at most one cycle long. None of a table."""
        uses, start = self._expected.uses, self._cursor
        for distance in range(len(uses)):
            yield uses[(start + distance) % len(uses)]

    def ahead(self, count: int) -> list[tuple[int, float]]:
        """The `count` items that are needed next, each with its `next_use`: groups as in
        `upcoming`, and between them the items that the backward pass needs of the tables there."""
        uses, start = self._expected.uses, self._cursor
        distances: dict[int, float] = {}
        for distance in range(min(count, len(uses))):
            position = start + distance
            for table in self._expected.backward_at.get(position, ()):
                for item in self._coming_back(table, count):
                    distances.setdefault(item, self.next_use(item))
            if len(distances) >= count:
                break
            distances.setdefault(uses[position % len(uses)], distance)
        return list(itertools.islice(distances.items(), count))

    def _coming_back(self, table: Table, count: int) -> Iterator[int]:
        """The first `count` of the items that backward uses of a table."""
        order = table.chosen if self._recomputes else reversed(table.chosen)
        return itertools.islice(order, count)

    def rest(self) -> Iterator[int]:
        """Groups like those of `upcoming`, but after this pass of the model: a step may have
        changed the uses there."""
        cycle, cursor = self._expected, self._cursor
        yield from cycle.uses[cursor : cycle.end_of_pass(cursor)]

    def is_over(self, group: int) -> bool:
        """Whether this pass, which is in its backward, is expected not to use the group again: as
        the last step did, or as often as its forward did."""
        table = self._table_of.get(group)
        if table is not None:
            known = self.learnt and self._on_trace
            return group not in table.chosen or (
                known and math.isinf(self._backward_use(group, table))
            )
        if self.learnt and self._on_trace:
            position = self._expected.next_position(group, self._cursor)
            return position is None or position >= self._expected.end_of_pass(self._cursor)
        forward = self._recorded[self._forward_start : self._backward_start]
        done = self._recorded[self._backward_start :].count(group) + (group == self._turn)
        return done >= forward.count(group)

    def next_use(self, group: int) -> float:
        """Uses until `group` is expected again; infinity if it never was. What is chosen comes
        before the use that its table stands before."""
        table = self._table_of.get(group)
        if table is not None:
            return min(self._backward_use(group, table), self._forward_use(group, table))
        position = self._expected.next_position(group, self._cursor)
        if position is not None:
            return position - self._cursor
        return self.next_cycle_use(group)

    def next_cycle_use(self, group: int) -> float:
        """Uses until `group` is expected for the first time in the next cycle. What this cycle has
        chosen counts as chosen in the next one, too: its update, at the latest, needs it there."""
        cycle, cursor = self._expected, self._cursor
        table = self._table_of.get(group)
        if table is None:
            position = cycle.next_position(group, 0)
            return math.inf if position is None else len(cycle.uses) - cursor + position
        share = 1.0 if group in self._choices else table.share_of(group)
        return (len(cycle.uses) - cursor + cycle.next_forward_place(table, 0)) / share

    def _backward_use(self, item: int, table: Table) -> float:
        """Uses until the backward of this pass needs what the forward has chosen; infinity if it
        does not."""
        order = table.order_of(item)
        if order is None:
            return math.inf
        cycle, cursor = self._expected, self._cursor
        stop = cycle.end_of_pass(cursor if self._in_backward else cursor + 1)
        place = cycle.next_backward_place(table, cursor, stop)
        return place - cursor - (1 - order if self._recomputes else order)

    def _forward_use(self, item: int, table: Table) -> float:
        """Uses until a forward comes to the item's table, over the share that chooses it."""
        cycle, cursor = self._expected, self._cursor
        done = table.settled_at == cursor or table.order_of(item) is not None  # where it is now
        place = cycle.next_forward_place(table, cursor + done)
        if math.isinf(place):
            place = len(cycle.uses) + cycle.next_forward_place(table, 0)
        return (place - cursor + 0.5) / table.share_of(item)

    def first_uses(self) -> list[int]:
        """Groups in the order of their first use in the cycle being recorded."""
        firsts: dict[int, float] = {item: place - 0.5 for item, place in self._choices.items()}
        for position, group in enumerate(self._recorded):
            firsts.setdefault(group, position)
        return sorted(firsts, key=lambda group: firsts[group])
