"""Simulates which copies of states are in memory: a slot pool without bytes, over a step's uses.

It uses the same arena (`tiers/arena.py`), trace (`swap/trace.py`) and eviction rule
(`swap/slot_pool.py`) as the runtime, with two simplifications: every move ends before the next one
begins, and only the current group uses its copies.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

from offload.swap.states.trace import Trace
from offload.tiers.arena import Arena
from offload.tiers.eviction import MADE_HERE
from offload.tiers.ledger import StateClass


@dataclass(eq=False, frozen=True, slots=True)
class Copyable:
    """A state that may have a copy: a group's parameters or gradients, or a record. Names break
    ties when copies are evicted."""

    name: str
    group: int
    nbytes: int
    state_class: StateClass
    chunks: int = 1  # that are taken together, where there are very many
    is_decoded: bool = False  # values made of codes, which are given up before anything else
    passes: float = 1.0  # until one of those that it stands for is used again


@dataclass(slots=True)
class _Copy:
    offset: int
    stamp: int = 0  # of its latest entry in the heap


# Minus the next use, minus the bytes, the name, the copy's stamp
_Entry = tuple[float, int, str, int, Copyable]


class HeldCopies:
    """Simulates the copies in `nbytes` of memory.

    A heap finds the copy that is needed last: the next use of a copy changes only while it is
    locked, at its own use, and for all copies when a step begins.
    """

    def __init__(self, nbytes: int, trace: Trace) -> None:
        self._nbytes = max(0, nbytes)
        self._arena = Arena(self._nbytes)
        self._trace = trace
        self._held: dict[Copyable, _Copy] = {}
        self._locked: set[Copyable] = set()
        self._dirty: dict[Copyable, None] = {}  # nowhere else yet, in a fixed order
        self._used_up: dict[Copyable, None] = {}  # read again only if a step is redone
        self._old: dict[int, int] = {}  # offsets and bytes of what that would go back to
        self.sent: list[Copyable] = []  # dirty ones that went home for others, until it is taken
        self._stamps = itertools.count(1)
        self._heap: list[_Entry] = []
        self._used = dict.fromkeys(StateClass, 0)
        self.most = dict(self._used)  # bytes by class, when all together were most
        self._most_nbytes = 0
        self.evictions = 0

    def __contains__(self, piece: Copyable) -> bool:
        return piece in self._held

    @property
    def high_water_nbytes(self) -> int:
        return self._arena.high_water_nbytes

    def begin_step(self) -> None:
        """Enter all copies anew, since the expected uses of all have changed."""
        self._heap = []
        for piece in self._held:
            self._enter(piece)

    def work_on(self, *pieces: Copyable) -> None:
        """Lock these copies against eviction, and unlock the ones locked before."""
        before, self._locked = self._locked, set(pieces)
        for piece in before:
            if piece in self._held:
                self._enter(piece)

    def write(self, piece: Copyable) -> None:
        """Mark the copy as newer than its home: it stays, and is sent home if its room is needed or
        if more than half of the memory has such copies."""
        self._dirty[piece] = None
        staying = sum(each.nbytes for each in self._dirty)
        room = self._nbytes - sum(self._old.values())
        for each in sorted(self._dirty, key=self._next_use, reverse=True):
            if staying <= room // 2:
                return
            if each is piece:  # it is written just now
                continue
            del self._dirty[each]
            self.sent.append(each)
            staying -= each.nbytes

    def use_up(self, piece: Copyable) -> None:
        """Mark the copy as not expected to be read before it is dropped."""
        self._used_up[piece] = None
        if piece in self._held:
            self._enter(piece)

    def keep_old(self, nbytes: int) -> None:
        """Keep the old version of an updated state at home in this memory until the step ends."""
        if not nbytes:
            return
        offset = self._arena.allocate(nbytes)
        if offset is None:
            end = self._trace.cursor + self._trace.uses_left
            offset = self._make_room(Copyable("", -1, nbytes, StateClass.STAGING), end)
        if offset is not None:
            self._old[offset] = nbytes
            self._count(StateClass.STAGING, nbytes)

    def drop_used_up(self) -> None:
        for piece in list(self._used_up):
            self.drop(piece)
        for offset, nbytes in self._old.items():
            self._arena.free(offset)
            self._used[StateClass.STAGING] -= nbytes
        self._old.clear()

    def demand(self, piece: Copyable) -> bool:
        """Make the copy, whatever has to be evicted. If all other copies are locked, the plan does
        not fit, and the copy only passes through."""
        self._take(piece, None)
        return True

    def offer(self, piece: Copyable) -> bool:
        """Make the copy if there is room, or if copies that are needed later can be evicted."""
        return self._take(piece, self._next_use(piece))

    def drop(self, piece: Copyable) -> None:
        """Evict the copy, if there is one."""
        self._dirty.pop(piece, None)
        self._used_up.pop(piece, None)
        copy = self._held.pop(piece, None)
        if copy is not None:
            self._arena.free(copy.offset)
            self._used[piece.state_class] -= piece.nbytes

    def _take(self, piece: Copyable, before: float | None) -> bool:
        if piece in self._held:
            return True
        offset = self._arena.allocate(piece.nbytes)
        if offset is None:
            offset = self._make_room(piece, before)
        if offset is None:
            return False
        self._held[piece] = _Copy(offset)
        self._enter(piece)
        self._count(piece.state_class, piece.nbytes)
        return True

    def _count(self, state_class: StateClass, nbytes: int) -> None:
        self._used[state_class] += nbytes
        if self._arena.used_nbytes > self._most_nbytes:
            self._most_nbytes = self._arena.used_nbytes
            self.most = dict(self._used)

    def _make_room(self, new: Copyable, before: float | None) -> int | None:
        """Evict copies, the one needed last first, then send dirty ones home, until there is room.
        Return the offset; None if there is not enough room."""
        offset, kept, dirty = self._give_up(new.nbytes, before)
        steps_end = self._trace.cursor + self._trace.uses_left
        if before is None or (new.state_class is not StateClass.OPTIMIZER and before < steps_end):
            for entry in dirty:
                if offset is not None or (before is not None and -entry[0] <= before):
                    break
                piece = entry[-1]
                self.sent.append(piece)
                self.drop(piece)
                self.evictions += 1
                offset = self._arena.allocate(new.nbytes)
        for entry in (*kept, *dirty):
            if entry[-1] in self._held:
                heapq.heappush(self._heap, entry)
        return offset

    def _give_up(
        self, nbytes: int, before: float | None
    ) -> tuple[int | None, list[_Entry], list[_Entry]]:
        """Evict clean copies, the one needed last first. Return also locked and dirty ones."""
        kept: list[_Entry] = []
        dirty: list[_Entry] = []
        offset = None
        while self._heap and offset is None:
            entry = heapq.heappop(self._heap)
            next_use, _, _, stamp, piece = entry
            copy = self._held.get(piece)
            if copy is None or copy.stamp != stamp:
                continue
            if piece in self._locked or piece in self._dirty:
                (kept if piece in self._locked else dirty).append(entry)
                continue
            if before is not None and -next_use <= before:
                kept.append(entry)
                break
            self.drop(piece)
            self.evictions += 1
            offset = self._arena.allocate(nbytes)
        return offset, kept, dirty

    def _enter(self, piece: Copyable) -> None:
        copy = self._held[piece]
        copy.stamp = next(self._stamps)
        entry = (-self._next_use(piece), -piece.nbytes, piece.name, copy.stamp, piece)
        heapq.heappush(self._heap, entry)

    def _next_use(self, piece: Copyable) -> float:
        """The next use, in uses from the start of this step. As in the runtime, a pending update
        counts as one of the next step's."""
        trace = self._trace
        if piece in self._used_up:
            return math.inf
        if piece.state_class in (StateClass.PARAMETERS, StateClass.KV):
            use = trace.cursor + piece.passes * trace.next_use(piece.group)
            return use + MADE_HERE if piece.is_decoded else use
        return trace.cursor + trace.next_cycle_use(piece.group) + 0.5
