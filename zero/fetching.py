"""Which states are fetched, and when: in the order of their use, ahead of it.

    used        a  b  c  d                  the trace learns this order and expects it again
    need(b)        ├ b is here
    fetched ahead     ├ c ├ d               the next ones in the trace, while there is room
    announce(x, y)    ├ x ├ y ├ c ├ d       a module chose x and y: before what the trace expects

An item to be fetched has a number and a state. A group of parameters is one; so may be a part of a
group that is fetched only when it is chosen, after its module has run in part (an expert after its
router).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from offload.swap.io_backend import Priority
from offload.swap.state import State
from offload.swap.trace import Trace


class Fetchable(Protocol):
    """Something that moves as a whole."""

    @property
    def index(self) -> int:
        """Its number in the trace."""
        ...

    @property
    def state(self) -> State: ...


class PendingUpdates(Protocol):
    """Pending updates of the items. An update also brings the item's state."""

    def is_pending(self, index: int) -> bool: ...

    def promote(self, index: int) -> None:
        """The item is needed now: its update is the next to begin."""
        ...


class NoUpdates:
    """No item ever changes."""

    def is_pending(self, index: int) -> bool:
        return False

    def promote(self, index: int) -> None:
        """There is no update."""


class Fetcher:
    """Brings states before they are used. For the thread of the model."""

    def __init__(self, depth: int) -> None:
        """At most `depth` states are fetched ahead."""
        self.trace = Trace()
        self.updates: PendingUpdates = NoUpdates()
        self._depth = depth
        self._items: list[Fetchable] = []
        self._any_moves = False  # else there is nothing to fetch
        self._needed: int | None = None  # the item used last
        self._announced: dict[int, Fetchable] = {}  # chosen and not used yet, the next one first

    @property
    def next_number(self) -> int:
        """The number of the next item to be added."""
        return len(self._items)

    def add(self, item: Fetchable) -> None:
        """Let `item`, whose number is `next_number`, be used and expected from now on."""
        assert item.index == self.next_number, "numbered in order"
        self._items.append(item)
        self._any_moves |= not item.state.in_place

    def next_use(self, index: int) -> float:
        """Uses until an item is needed; infinity if it is not expected."""
        if index == self._needed:
            return 0.0
        expected = self.trace.next_use(index)
        if index in self._announced:
            return min(expected, 1.0 + list(self._announced).index(index))
        return expected

    def need(self, item: Fetchable, *, backward: bool = False) -> None:
        """`item` is used now: note the use, move its update to the front or begin to bring it."""
        index = item.index
        self._needed = index  # prefetches must not evict it before it is used
        self._announced.pop(index, None)
        if self.trace.use(index, backward=backward):
            item.state.note_use()
        if self.updates.is_pending(index):
            self.updates.promote(index)
        else:  # it leases its slot before prefetches do: they may leave no hole of its size
            item.state.bring(next_use=0, priority=Priority.URGENT)

    def announce(self, chosen: Sequence[Fetchable]) -> None:
        """A module chose the items it needs next, in this order: begin to bring them, as far as
        there is room. Items chosen before and not used since are no longer expected."""
        self._announced = {item.index: item for item in chosen}
        for distance, item in enumerate(chosen, 1):
            if not self._bring(item, distance):
                return

    def fetch_ahead(self) -> None:
        """Begin to bring the items that are used next."""
        if not self._any_moves:
            return
        for index, next_use in self.trace.ahead(self._depth):
            if not self._bring(self._items[index], next_use):
                return

    def _bring(self, item: Fetchable, next_use: float) -> bool:
        if self.updates.is_pending(item.index):
            return True  # its update brings it
        return item.state.bring(next_use=next_use)
