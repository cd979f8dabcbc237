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

Where several models share a trace (the parts of a pipeline), each expects its own last pass:

    used       t v ┊ d d d d ┊ v ┊ t v ┊ d
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from offload.swap.states.choices import Table
from offload.swap.states.schedule import Cursor, Place, Schedule

# A cycle this long is over: parts of a model may be called for ever, with no forward of the whole.
LONGEST_CYCLE = 1 << 14


@dataclass(slots=True)
class _Cycle:
    """The uses so far in the cycle under way, and where its passes and tables are among them."""

    uses: list[int] = field(default_factory=list)  # of items in no table
    last: int | None = None  # the use that a repeat in a row would repeat
    forwards: list[int] = field(default_factory=list)  # positions where forwards began
    places: list[Place] = field(default_factory=list)
    choices: dict[int, int] = field(default_factory=dict)  # items of tables: where each came first

    def use(self, item: int) -> None:
        self.last = item
        self.uses.append(item)

    def choose(self, item: int, table: Table, *, backward: bool) -> None:
        place = (len(self.uses), table, backward)
        if not self.places or self.places[-1] != place:
            self.places.append(place)
        self.choices.setdefault(item, len(self.uses))

    def take_out(self, taken: _Pass) -> Schedule:
        """Take out the last pass, and return it as a schedule of its own."""
        start, places = taken.start, self.places[taken.places_before :]
        shifted = [(position - start, table, backward) for position, table, backward in places]
        schedule = Schedule(self.uses[start:], places=shifted)
        del self.uses[start:], self.places[taken.places_before :]
        while len(self.choices) > taken.choices_before:
            self.choices.popitem()  # the last one that was put in
        self.last = None
        self.forwards = [begun for begun in self.forwards if begun < start]
        return schedule

    def end(self, before: Schedule) -> Schedule:
        """The schedule of this cycle. A table without a choice in it keeps its places of the cycle
        `before`, if the uses are the same."""
        places = self.places
        if tuple(self.uses) == before.uses:
            seen = {(table, backward) for _, table, backward in places}
            places = [*places, *(place for place in before.places if place[1:] not in seen)]
        return Schedule(self.uses, self.forwards, places)


@dataclass(slots=True)
class _Pass:
    """The pass of the whole model under way: a forward, and its backward once that has begun."""

    start: int = 0  # where it begins in the cycle
    places_before: int = 0  # in the cycle
    choices_before: int = 0
    last_choice: int | None = None  # in its forward, or in its backward
    in_backward: bool = False
    backward_start: int = 0
    turning: bool = False  # the backward has used nothing yet that is in no table
    turn: int | None = None  # used last in the forward and first in the backward

    def begin(self, cycle: _Cycle) -> None:
        self.start, self.last_choice = len(cycle.uses), None
        self.places_before, self.choices_before = len(cycle.places), len(cycle.choices)
        self.in_backward = self.turning = False

    def begin_backward(self, cycle: _Cycle) -> None:
        self.in_backward = self.turning = True
        self.turn = self.last_choice = None
        self.backward_start = len(cycle.uses)

    def is_as_often_in_backward(self, item: int, uses: Sequence[int]) -> bool:
        """Whether the backward has used `item` as often as the forward did, by the cycle's uses."""
        forward = uses[self.start : self.backward_start]
        done = uses[self.backward_start :].count(item) + (item == self.turn)
        return done >= forward.count(item)


class Trace:
    """The uses of groups (named by small integers) in one cycle, and those expected next. Not
    thread-safe, but for `next_use` and `next_cycle_use`."""

    def __init__(self) -> None:
        self._steps = Schedule()  # the last complete cycle that ended with a step
        # in that, or in the last forward without a backward pass: another schedule is expected with
        # a new cursor, since other threads read it. For callers to read, not to move
        self.cursor = Cursor(self._steps)
        self._cycle = _Cycle()
        self._pass = _Pass()
        self._part = 0  # of the pass under way
        self._passes: dict[int, Schedule] = {}  # the last one of each part, without a backward
        self._tables: dict[str, Table] = {}
        self._table_of: dict[int, Table] = {}
        self._recomputes = False  # backward uses what was chosen in the order of its forward

    def put_in_table(self, item: int, table: str) -> None:
        """Put `item` in a table: a pass uses it only if it chooses it among the table's items."""
        self._table_of[item] = self._tables.setdefault(table, Table())

    def assume(self, uses: Sequence[int], part: int = 0) -> None:
        """Expect the first pass of a part to use these groups in this order. A different order is
        handled like any later change of order."""
        self._passes[part] = Schedule(group for group, _ in itertools.groupby(uses))
        if part == self._part:
            self.cursor = Cursor(self._passes[part])

    def announce(self, chosen: Iterable[int]) -> None:
        """Record that the model chose these items, and no others of their tables, for use now."""
        if not self._pass.in_backward:
            for table in {self._table_of[item] for item in chosen if item in self._table_of}:
                table.settled_at = self.cursor.position

    def use(self, group: int, *, backward: bool = False) -> bool:
        """Record that `group` is used now, in a backward pass or not. False for a repeat in a row,
        which counts once."""
        if backward and not self._pass.in_backward:
            self._begin_backward()
        table = self._table_of.get(group)
        if table is not None:
            return self._choose(group, table, backward=backward)
        last = self._cycle.last
        if self._pass.turning:
            self._pass.turning = False
            self._pass.turn = group if last == group else None
        if last == group:
            return False
        if len(self._cycle.uses) >= LONGEST_CYCLE:
            self.end_cycle()
        self._cycle.use(group)
        self.cursor.follow(group)
        return True

    def repeats(self, group: int, *, backward: bool) -> bool:
        """Whether `use` would count nothing: the group was used last, in this pass."""
        now = self._pass
        if group in self._table_of:
            return now.last_choice == group and (now.in_backward or not backward)
        same = self._cycle.last == group
        return same and (not backward or (now.in_backward and not now.turning))

    def _choose(self, item: int, table: Table, *, backward: bool) -> bool:
        if self._pass.last_choice == item:
            return False
        self._pass.last_choice = item
        self._cycle.choose(item, table, backward=backward)
        if not backward:
            table.use(item)
        elif item in table.chosen:
            if len(table.chosen) > 1:
                self._recomputes = item == next(iter(table.chosen))
            del table.chosen[item]
        return True

    def begin_forward(self, part: int = 0) -> None:
        """Begin a forward pass of the whole model, or of this part of it. If no backward pass
        followed the last one, none is expected now."""
        if len(self._cycle.uses) > self._pass.start and not self._pass.in_backward:
            self._passes[self._part] = self._cycle.take_out(self._pass)
            self.cursor = Cursor(self._passes[self._part])
        if part != self._part:
            self._part = part
            self.cursor = Cursor(self._passes.get(part, Schedule()))
        self._cycle.forwards.append(len(self._cycle.uses))
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._pass.begin(self._cycle)
        for table in self._tables.values():
            table.begin_pass()

    def _begin_backward(self) -> None:
        """Begin a backward pass: expect the rest of a cycle that ends with a step."""
        self._pass.begin_backward(self._cycle)
        if self.cursor.schedule is not self._steps:
            self.cursor = Cursor(self._steps, after=self._cycle.uses)

    def end_cycle(self) -> None:
        """End the cycle with a step: what was recorded is expected in the next cycle."""
        if not self._cycle.uses:
            return
        self._steps = self._cycle.end(self._steps)
        self._cycle = _Cycle()
        self._begin_pass()
        self.cursor = Cursor(self._steps)

    def ahead(self, count: int) -> list[tuple[int, float]]:
        """The `count` items that are needed next, each with its `next_use`: groups as in
        `upcoming`, and between them the items that the backward pass needs of the tables there."""
        schedule, start = self.cursor.schedule, self.cursor.position
        uses = schedule.uses
        distances: dict[int, float] = {}
        for distance in range(min(count, len(uses))):
            position = start + distance
            for table in schedule.backward_at.get(position, ()):
                order = table.chosen if self._recomputes else reversed(table.chosen)
                for item in itertools.islice(order, count):
                    distances.setdefault(item, self.next_use(item))
            if len(distances) >= count:
                break
            distances.setdefault(uses[position % len(uses)], distance)
        return list(itertools.islice(distances.items(), count))

    def is_over(self, group: int) -> bool:
        """Whether this pass, which is in its backward, is expected not to use the group again: as
        the last step did, or as often as its forward did."""
        table, is_known = self._table_of.get(group), self.cursor.is_on_schedule
        if table is not None:
            order = table.order_of(group)
            return order is None or (is_known and math.isinf(self._backward_use(table, order)))
        if is_known:
            return self.cursor.is_over(group)
        return self._pass.is_as_often_in_backward(group, self._cycle.uses)

    def next_use(self, group: int) -> float:
        """Uses until `group` is expected again; infinity if it never was. What is chosen comes
        before the use that its table stands before."""
        table = self._table_of.get(group)
        if table is None:
            return self.cursor.next_use(group)
        order = table.order_of(group)
        until = self.cursor.until_forward(table, done=order is not None)
        forward = (until + 0.5) / table.share_of(group)
        return forward if order is None else min(self._backward_use(table, order), forward)

    def next_cycle_use(self, group: int) -> float:
        """Uses until `group` is expected for the first time in the next cycle. What this cycle has
        chosen counts as chosen in the next one, too: its update, at the latest, needs it there."""
        table = self._table_of.get(group)
        if table is None:
            return self.cursor.next_cycle_use(group)
        share = 1.0 if group in self._cycle.choices else table.share_of(group)
        return self.cursor.until_next_cycle(table) / share

    def _backward_use(self, table: Table, order: float) -> float:
        """Uses until the backward of this pass needs the item that the forward chose at `order`;
        infinity if it does not."""
        until = self.cursor.until_backward(table, in_backward=self._pass.in_backward)
        return until - (1 - order if self._recomputes else order)

    def first_uses(self) -> list[int]:
        """Groups in the order of their first use in the cycle being recorded."""
        firsts: dict[int, float] = {item: at - 0.5 for item, at in self._cycle.choices.items()}
        for position, group in enumerate(self._cycle.uses):
            firsts.setdefault(group, position)
        return sorted(firsts, key=lambda group: firsts[group])
