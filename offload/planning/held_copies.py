"""Which copies of states are in memory when: a slot pool without its bytes, over a step's uses.

The same arena and the same rule of who gives way (`swap/slot_pool.py`). Two things are taken as
ideal: every move is over when the next one begins, and nobody looks at a copy but the group at
work.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Hashable, Sequence
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

    def of_parameters(self, group: int) -> float:
        positions = self._positions.get(group, [])
        index = bisect.bisect_left(positions, self.cursor)
        return positions[index] if index < len(positions) else self.in_next_step(group)

    def in_next_step(self, group: int) -> float:
        positions = self._positions.get(group)
        return self._count + positions[0] if positions else math.inf

    def of_update(self, group: int) -> float:
        """As the runtime has it: a pending update counts as one of the next step's."""
        return self.in_next_step(group) + 0.5

    def upcoming(self, most: int) -> list[int]:
        """The next groups, at most one step long."""
        count = min(most, self._count)
        return [self.order[(self.cursor + ahead) % self._count] for ahead in range(count)]


@dataclass(slots=True)
class _Copy:
    group: int
    nbytes: int
    offset: int
    of_parameters: bool


class HeldCopies:
    """Copies in `nbytes` of memory, by any key."""

    def __init__(self, nbytes: int, uses: Uses) -> None:
        self._arena = Arena(max(0, nbytes))
        self._uses = uses
        self._held: dict[Hashable, _Copy] = {}
        self._needed: int | None = None  # the group at work
        self._locked: set[Hashable] = set()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def work_on(self, group: int | None, *keys: Hashable) -> None:
        """`group` is at work from here on, and these copies cannot be given up."""
        self._needed = group
        self._locked = set(keys)

    def demand(self, key: Hashable, group: int, nbytes: int, *, of_parameters: bool) -> bool:
        """Make the copy, whatever has to go for it. False where all that is left is locked."""
        return self._take(key, _Copy(group, nbytes, 0, of_parameters), None)

    def offer(
        self, key: Hashable, group: int, nbytes: int, next_use: float, *, of_parameters: bool
    ) -> bool:
        """Make the copy if there is room, or copies that are needed later than `next_use`."""
        return self._take(key, _Copy(group, nbytes, 0, of_parameters), next_use)

    def drop(self, key: Hashable) -> None:
        """Give the copy up, if there is one."""
        copy = self._held.pop(key, None)
        if copy is not None:
            self._arena.free(copy.offset)

    def _take(self, key: Hashable, copy: _Copy, before: float | None) -> bool:
        if key in self._held:
            return True
        offset = self._arena.allocate(copy.nbytes)
        if offset is None:
            offset = self._make_room(copy.nbytes, before)
        if offset is None:
            return False
        copy.offset = offset
        self._held[key] = copy
        return True

    def _make_room(self, nbytes: int, before: float | None) -> int | None:
        for next_use, victim in self._furthest_first():
            if before is not None and next_use <= before:
                return None
            self.drop(victim)
            offset = self._arena.allocate(nbytes)
            if offset is not None:
                return offset
        return None

    def _furthest_first(self) -> list[tuple[float, Hashable]]:
        found = [
            (self._next_use(copy), copy.nbytes, key)
            for key, copy in self._held.items()
            if key not in self._locked
        ]
        found.sort(key=lambda each: (-each[0], -each[1]))
        return [(next_use, key) for next_use, _, key in found]

    def _next_use(self, copy: _Copy) -> float:
        if not copy.of_parameters:
            return self._uses.of_update(copy.group)
        if copy.group == self._needed:
            return self._uses.cursor
        return self._uses.of_parameters(copy.group)
