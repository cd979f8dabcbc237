"""The fetching of states, ahead of their use and in its order.

    used        a  b  c  d                  the trace learns this order and expects it again
    need(b)        ├ b is here
    fetched ahead     ├ c ├ d               the next ones in the trace, while there is room
    announce(x, y)    ├ x ├ y ├ c ├ d       a module chose x and y: before what the trace expects

An item to be fetched has a number and a state. A group of parameters is one. Items of a table are
fetched only when they are chosen, after their module has run in part (experts after their router):
in forward when they are announced or used, in backward ahead of it, for what the forward has chosen
is what the backward needs. They are never guessed (benchmarks/records/expert-residency.md has what
guesses would cost).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from offload.swap.io.io_backend import Priority
from offload.swap.states.trace import Trace

REPEATS = 4  # so many uses in a row of one group, and what comes next is looked for again
_NOW = -1.0  # before what is announced, and before the next use of the trace, which is at 0


class Bringable(Protocol):
    """A state, or several that are used together."""

    @property
    def in_place(self) -> bool:
        """Whether it never moves."""
        ...

    def prefetch(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        """Bring it, as `State.prefetch` does."""
        ...

    def note_use(self) -> None:
        """Note a use, as `State.note_use` does."""
        ...


class Fetchable(Protocol):
    """Something that moves as a whole."""

    @property
    def index(self) -> int:
        """Its number in the trace."""
        ...

    @property
    def state(self) -> Bringable: ...


class PendingUpdates:
    """Pending updates of the items: none, where no item ever changes. An update also brings the
    item's state."""

    def is_pending(self, index: int) -> bool:
        return False

    def promote(self, index: int) -> None:
        """Note that the item is needed now: its update is the next to begin."""


class Fetcher:
    """Brings states before they are used. For the thread of the model."""

    def __init__(self, depth: int) -> None:
        """`depth` is the greatest number of states that are fetched ahead."""
        self.trace = Trace()
        self.updates = PendingUpdates()
        self._depth = depth
        self._items: list[Fetchable] = []
        self._choices: set[int] = set()  # items that are in a table
        self._any_moves = False  # else there is nothing to fetch
        self._needed: int | None = None  # the item used last, in no table
        self._needed_choice: int | None = None  # ... in a table, since then
        # chosen and not used yet, the next one first, and when: between now and the next use of the
        # trace
        self._announced: dict[int, float] = {}

    @property
    def next_number(self) -> int:
        """The number of the next item to be added."""
        return len(self._items)

    def add(self, item: Fetchable, table: str = "") -> None:
        """Let `item`, whose number is `next_number`, be used and expected from now on; if it is in
        a `table`, by those passes that choose it."""
        assert item.index == self.next_number, "numbered in order"
        self._items.append(item)
        if table:
            self.trace.put_in_table(item.index, table)
            self._choices.add(item.index)
        self._any_moves |= not item.state.in_place

    def next_use(self, index: int) -> float:
        """Return the uses until an item is needed; infinity if unexpected. For any thread."""
        if index in (self._needed, self._needed_choice):
            return _NOW
        announced = self._announced.get(index)
        return self.trace.next_use(index) if announced is None else announced

    def begin_forward(self) -> None:
        """Note that the whole model is called."""
        self._announced = {}  # of a call that failed
        self.trace.begin_forward()

    def need(self, item: Fetchable, *, backward: bool = False) -> None:
        """Note that `item` is used now; move its update to the front or begin to bring it."""
        index = item.index
        self._needed_choice = index if index in self._choices else None
        if self._needed_choice is None:
            self._needed = index  # prefetches must not evict it before it is used
        self._announced.pop(index, None)
        if self.trace.use(index, backward=backward):
            item.state.note_use()
        if self.updates.is_pending(index):
            self.updates.promote(index)
        else:  # it leases its slot before prefetches do: they may leave no hole of its size
            item.state.prefetch(next_use=_NOW, priority=Priority.URGENT)

    def announce(self, chosen: Sequence[Fetchable]) -> None:
        """A module chose the items it needs next, in this order: begin to bring them, as far as
        there is room. Items chosen before and not used since are no longer expected."""
        self.trace.announce(item.index for item in chosen)
        share = 1 / (len(chosen) + 1)
        self._announced = {item.index: _NOW + n * share for n, item in enumerate(chosen, 1)}
        for item in reversed(chosen):
            if self.updates.is_pending(item.index):
                self.updates.promote(item.index)
        if self._bring_announced():
            self._bring_all(self.trace.ahead(self._depth))

    def fetch_ahead(self) -> None:
        """Begin to bring the items that are used next."""
        if not self._any_moves or not self._bring_announced():
            return
        # of what was announced the last one looks further ahead, not each of them
        if not self._announced or self._needed_choice is None:
            self._bring_all(self.trace.ahead(self._depth))

    def _bring_announced(self) -> bool:
        # in front of what is being read ahead: the model's thread waits for these
        return self._bring_all(self._announced.items(), Priority.URGENT)

    def _bring_all(
        self, coming: Iterable[tuple[int, float]], priority: Priority = Priority.NORMAL
    ) -> bool:
        """Bring items with these next uses, while there is room. Returns whether all had room."""
        for index, next_use in coming:
            if self.updates.is_pending(index):
                continue  # its update brings it
            if not self._items[index].state.prefetch(next_use=next_use, priority=priority):
                return False
        return True
