"""Prefetches states in the order of their uses.

    used        a  b  c  d                  the trace learns this order and expects it again
    need(b)        ├ b is in memory
    prefetched        ├ c ├ d               the next items of the trace, while there is room
    announce(x, y)    ├ x ├ y ├ c ├ d       a module chose x and y: before what the trace expects

An item has a number and a state; a group of parameters is one. Items of a table (experts) are
fetched only once they are chosen, which is after a part of their module has run (the router): in
forward when they are announced or used, in backward ahead of their use, since backward needs the
items that forward has chosen. They are never guessed (benchmarks/records/expert-residency.md has
the cost of guesses).
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from offload.swap.io.io_backend import Priority
from offload.swap.states.trace import Trace

REPEATS = 4  # uses of one group in a row after which prefetching is tried again
_NOW = -1.0  # a next use before announced ones, and before the trace's next, which is at 0


class Prefetchable(Protocol):
    """A state, or several that are used together, with these parts of `State`."""

    @property
    def in_place(self) -> bool: ...
    def prefetch(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool: ...
    def note_use(self) -> None: ...


class Fetchable(Protocol):
    """Something that moves as a whole; `index` is its number in the trace."""

    @property
    def index(self) -> int: ...
    @property
    def state(self) -> Prefetchable: ...


class PendingUpdates:
    """Pending updates of the items: none, where no item ever changes. An update also fetches the
    item's state."""

    def is_pending(self, index: int) -> bool:
        return False

    def promote(self, index: int) -> None:
        """Note that the item is needed now: its update is the next to begin."""


class Fetcher:
    """Fetches states before they are used. Its methods are for the thread of the model."""

    def __init__(self, depth: int) -> None:
        """At most `depth` states are prefetched from the trace."""
        self.trace = Trace()
        self.updates = PendingUpdates()
        self._depth = depth
        self._items: list[Fetchable] = []
        self._choices: set[int] = set()  # items that are in a table
        self._any_moves = False  # whether any item is ever to be fetched
        self._needed: int | None = None  # the item used last, in no table
        self._needed_choice: int | None = None  # the item of a table used since then
        # chosen items that are not used yet, in order, with their next uses: between now and the
        # next use of the trace
        self._announced: dict[int, float] = {}

    @property
    def next_number(self) -> int:
        return len(self._items)

    def add(self, item: Fetchable, table: str = "") -> None:
        """Add `item`, whose number is `next_number`. An item of a `table` is expected only by
        passes that choose it."""
        assert item.index == self.next_number, "numbered in order"
        self._items.append(item)
        if table:
            self.trace.put_in_table(item.index, table)
            self._choices.add(item.index)
        self._any_moves |= not item.state.in_place

    def replace(self, item: Fetchable) -> None:
        self._items[item.index] = item

    def next_use(self, index: int) -> float:
        """Return the uses until an item is needed; infinity if unexpected. For any thread."""
        if index in (self._needed, self._needed_choice):
            return _NOW
        announced = self._announced.get(index)
        return self.trace.next_use(index) if announced is None else announced

    def begin_forward(self, part: int = 0) -> None:
        """Note that the whole model is called, or this part of it."""
        self._announced = {}  # of a forward that failed
        self.trace.begin_forward(part)

    def need(self, item: Fetchable, *, backward: bool = False) -> None:
        """Note that `item` is used now; move its update to the front, or start to fetch it."""
        index = item.index
        self._needed_choice = index if index in self._choices else None
        if self._needed_choice is None:
            self._needed = index  # prefetches must not evict it before it is used
        self._announced.pop(index, None)
        if self.trace.use(index, backward=backward):
            item.state.note_use()
        if self.updates.is_pending(index):
            self.updates.promote(index)
        else:  # leases its slot before any prefetch: those might leave no hole of its size
            item.state.prefetch(next_use=_NOW, priority=Priority.URGENT)

    def announce(self, chosen: Sequence[Fetchable]) -> None:
        """Start to fetch the items that a module has chosen to use next, in this order, while there
        is room. Items chosen before and not used since are no longer expected."""
        self.trace.announce(item.index for item in chosen)
        share = 1 / (len(chosen) + 1)
        self._announced = {item.index: _NOW + n * share for n, item in enumerate(chosen, 1)}
        for item in reversed(chosen):
            if self.updates.is_pending(item.index):
                self.updates.promote(item.index)
        if self._fetch_announced():
            self._fetch_all(self.trace.ahead(self._depth))

    def fetch_ahead(self) -> None:
        if not self._any_moves or not self._fetch_announced():
            return
        # the last use of an announced item prefetches from the trace, not each of them
        if not self._announced or self._needed_choice is None:
            self._fetch_all(self.trace.ahead(self._depth))

    def _fetch_announced(self) -> bool:
        # before prefetches of the trace in the queue: the model's thread waits for these
        return self._fetch_all(self._announced.items(), Priority.URGENT)

    def _fetch_all(
        self, coming: Iterable[tuple[int, float]], priority: Priority = Priority.NORMAL
    ) -> bool:
        """Start to fetch items with these next uses. Return False once there is no room."""
        for index, next_use in coming:
            if self.updates.is_pending(index):
                continue  # its update fetches it
            if not self._items[index].state.prefetch(next_use=next_use, priority=priority):
                return False
        return True
