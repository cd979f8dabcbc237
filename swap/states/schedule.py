"""The order in which uses are expected, and how far they have come.

    schedule     a     b     c     c     b     a      the uses of one cycle, and places of tables
    cursor                   ▲                        before the use that is expected next
    distances    4     5     0     1     2     3      from now: the next cycle is like this one

A `Trace` makes a schedule of the uses that it has recorded, and moves the cursor.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from offload.swap.states.choices import Table

Place = tuple[int, Table, bool]  # before which use a table stands; in a backward pass or not


class Schedule:
    """The uses of one cycle in their order, with the positions where forwards of the whole model
    began and the places of the tables. Never changed."""

    def __init__(
        self, uses: Iterable[int] = (), forwards: Iterable[int] = (), places: Iterable[Place] = ()
    ) -> None:
        self.uses = tuple(uses)
        self.places = tuple(dict.fromkeys(places))
        self._forwards = tuple(forwards)
        self.positions: dict[int, list[int]] = {}  # of each item, in order
        for position, item in enumerate(self.uses):
            self.positions.setdefault(item, []).append(position)
        self._places_of: dict[tuple[Table, bool], list[int]] = {}  # in backward passes or not
        # by position, the tables that a backward pass came to before the use there
        self.backward_at: dict[int, list[Table]] = {}
        for position, table, backward in self.places:
            self._places_of.setdefault((table, backward), []).append(position)
            if backward:
                self.backward_at.setdefault(position, []).append(table)

    def next_position(self, item: int, start: int) -> int | None:
        """The next position of `item` at or after `start`; None if there is none."""
        positions = self.positions.get(item, ())
        index = bisect_left(positions, start)
        return positions[index] if index < len(positions) else None

    def next_place(self, table: Table, start: int, *, backward: bool = False) -> float:
        """The first place of the table at or after `start`, in a pass of that kind, or infinity."""
        places = self._places_of.get((table, backward), ())
        index = bisect_left(places, start)
        return places[index] if index < len(places) else math.inf

    def end_of_pass(self, start: int) -> int:
        """The position at which the next forward pass begins, at or after `start`."""
        index = bisect_left(self._forwards, start)
        return self._forwards[index] if index < len(self._forwards) else len(self.uses)


class Cursor:
    """A position in a schedule, which follows the uses that come. One thread moves it; others may
    ask for distances meanwhile."""

    __slots__ = ("is_on_schedule", "position", "schedule")

    def __init__(self, schedule: Schedule, after: Iterable[int] = ()) -> None:
        """The cursor stands at the beginning, or `after` uses that have come already."""
        self.schedule = schedule
        self.position = 0  # of the use that is expected next
        self.is_on_schedule = bool(schedule.uses)  # the last use was expected
        for item in after:
            position = schedule.next_position(item, self.position)
            self.position = self.position if position is None else position + 1

    def follow(self, item: int) -> None:
        """Move behind the nearest use of `item` from here on; stay if there is none."""
        position = self.schedule.next_position(item, self.position)
        self.is_on_schedule = position is not None
        if position is not None:
            self.position = position + 1

    @property
    def uses_left(self) -> float:
        """Uses until the end of the schedule; infinity if that is empty."""
        uses = len(self.schedule.uses)
        return uses - self.position if uses else math.inf

    def upcoming(self) -> Iterator[int]:
        """Items in the order of their expected use, at most one cycle long. None of a table."""
        uses, start = self.schedule.uses, self.position
        for distance in range(len(uses)):
            yield uses[(start + distance) % len(uses)]

    def rest(self) -> Iterator[int]:
        """Items like those of `upcoming`, but none after this pass of the model: a step may have
        changed the uses there."""
        schedule, start = self.schedule, self.position
        yield from schedule.uses[start : schedule.end_of_pass(start)]

    def is_over(self, item: int) -> bool:
        """Whether this pass of the model is expected not to use `item` again."""
        schedule, start = self.schedule, self.position
        position = schedule.next_position(item, start)
        return position is None or position >= schedule.end_of_pass(start)

    def next_use(self, item: int) -> float:
        """Uses until the next one of `item`, in this cycle or the next; infinity if there is none.
        For items in no table."""
        schedule, start = self.schedule, self.position
        positions = schedule.positions.get(item)
        if positions is None:
            return math.inf
        index = bisect_left(positions, start)
        if index < len(positions):
            return positions[index] - start
        return len(schedule.uses) - start + positions[0]

    def next_cycle_use(self, item: int) -> float:
        """Uses until the first one of `item` in the next cycle; infinity if there is none."""
        positions = self.schedule.positions.get(item)
        return len(self.schedule.uses) - self.position + positions[0] if positions else math.inf

    def until_forward(self, table: Table, *, done: bool) -> float:
        """Uses until a forward comes to the table, in this cycle or the next. `done`: a forward is
        there now, and has used the item that is asked for."""
        schedule, start = self.schedule, self.position
        done = done or table.settled_at == start
        place = schedule.next_place(table, start + done)
        if math.isinf(place):
            place = len(schedule.uses) + schedule.next_place(table, 0)
        return place - start

    def until_next_cycle(self, table: Table) -> float:
        """Uses until a forward comes to the table in the next cycle."""
        schedule = self.schedule
        return len(schedule.uses) - self.position + schedule.next_place(table, 0)

    def until_backward(self, table: Table, *, in_backward: bool) -> float:
        """Uses until the backward of this pass comes to the table; infinity if it does not.
        `in_backward`: it has begun."""
        schedule, start = self.schedule, self.position
        stop = schedule.end_of_pass(start if in_backward else start + 1)
        place = schedule.next_place(table, start, backward=True)
        return place - start if place <= stop else math.inf
