"""Which copies of states are in memory when: a slot pool without its bytes, over a step's uses.

The same arena and the same rule of who gives way (`swap/slot_pool.py`). Two things are taken as
ideal: every move is over when the next one begins, and nobody looks at a copy but the group at
work.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.tiers.arena import Arena


class Uses:
    """When groups are needed next, in uses from the start of a step; `cursor` moves through it."""

    def __init__(self, uses: Sequence[int]) -> None:
        self._count = len(uses)
        self._positions: dict[int, list[int]] = {}
        for position, group in enumerate(uses):
            self._positions.setdefault(group, []).append(position)
        self.order = tuple(uses)
        self.cursor = 0
        self.learnt = True  # False in the first step: nothing is expected of anything

    def of_parameters(self, group: int) -> float:
        if not self.learnt:
            return math.inf
        positions = self._positions.get(group, [])
        index = bisect.bisect_left(positions, self.cursor)
        return positions[index] if index < len(positions) else self.in_next_step(group)

    def in_next_step(self, group: int) -> float:
        positions = self._positions.get(group)
        return self._count + positions[0] if positions and self.learnt else math.inf

    def of_update(self, group: int) -> float:
        """As the runtime has it: a pending update counts as one of the next step's."""
        return self.in_next_step(group) + 0.5

    def upcoming(self, most: int) -> Iterator[int]:
        """The next groups, at most one step long."""
        count = min(most, self._count) if self.learnt else 0
        return (self.order[(self.cursor + ahead) % self._count] for ahead in range(count))


@dataclass(slots=True)
class _Copy:
    group: int
    nbytes: int
    of_parameters: bool
    offset: int = 0
    stamp: int = 0  # of its latest entry in the heap


class HeldCopies:
    """Copies in `nbytes` of memory, by name: names decide where nothing else does.

    Who is needed last is known from a heap: when a copy is needed next changes only while it is
    locked, at its own use, and for all at once when a step begins.
    """

    def __init__(self, nbytes: int, uses: Uses) -> None:
        self._arena = Arena(max(0, nbytes))
        self._uses = uses
        self._held: dict[str, _Copy] = {}
        self._locked: set[str] = set()
        self._pinned: set[str] = set()  # dirty: nowhere else yet
        self._stamps = itertools.count(1)
        self._heap: list[tuple[float, int, str, int]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def begin_step(self) -> None:
        """All expectations have changed."""
        self._heap = []
        for name in self._held:
            self._enter(name)

    def work_on(self, *names: str) -> None:
        """These copies cannot be given up from here on, those before can."""
        before, self._locked = self._locked, set(names)
        for name in before:
            if name in self._held:
                self._enter(name)

    def pin(self, name: str) -> None:
        """Do not give the copy up until it is dropped."""
        self._pinned.add(name)

    def demand(self, name: str, group: int, nbytes: int, *, of_parameters: bool) -> bool:
        """Make the copy, whatever has to go for it. False where all that is left is locked."""
        return self._take(name, _Copy(group, nbytes, of_parameters), None)

    def offer(
        self, name: str, group: int, nbytes: int, next_use: float, *, of_parameters: bool
    ) -> bool:
        """Make the copy if there is room, or copies that are needed later than `next_use`."""
        return self._take(name, _Copy(group, nbytes, of_parameters), next_use)

    def drop(self, name: str) -> None:
        """Give the copy up, if there is one."""
        self._pinned.discard(name)
        copy = self._held.pop(name, None)
        if copy is not None:
            self._arena.free(copy.offset)

    def _take(self, name: str, copy: _Copy, before: float | None) -> bool:
        if name in self._held:
            return True
        offset = self._arena.allocate(copy.nbytes)
        if offset is None:
            offset = self._make_room(copy.nbytes, before)
        if offset is None:
            return False
        copy.offset = offset
        self._held[name] = copy
        self._enter(name)
        return True

    def _make_room(self, nbytes: int, before: float | None) -> int | None:
        """Give up copies, the one needed last first, until `nbytes` fit; None where they do not."""
        kept = []
        offset = None
        while self._heap and offset is None:
            entry = heapq.heappop(self._heap)
            next_use, _, name, stamp = entry
            copy = self._held.get(name)
            if copy is None or copy.stamp != stamp:
                continue
            if name in self._locked or name in self._pinned:
                kept.append(entry)
                continue
            if before is not None and -next_use <= before:
                kept.append(entry)
                break
            self.drop(name)
            offset = self._arena.allocate(nbytes)
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return offset

    def _enter(self, name: str) -> None:
        copy = self._held[name]
        copy.stamp = next(self._stamps)
        expected = self._uses.of_parameters if copy.of_parameters else self._uses.of_update
        heapq.heappush(self._heap, (-expected(copy.group), -copy.nbytes, name, copy.stamp))
