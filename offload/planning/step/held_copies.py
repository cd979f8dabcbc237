"""Which copies of states are in memory when: a slot pool without its bytes, over a step's uses.

The same arena (`tiers/arena.py`), the same trace (`swap/trace.py`) and the same rule of what is
given up (`swap/slot_pool.py`). Two things are taken as ideal: every move is over when the next one
begins, and only the group at work uses its copies.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from offload.swap.trace import Trace
from offload.tiers.arena import Arena
from offload.tiers.eviction import MADE_HERE
from offload.tiers.ledger import StateClass


@dataclass(eq=False, frozen=True, slots=True)
class Copyable:
    """What may have a copy: a group's parameters or gradients, or a record. Names decide what is
    given up where nothing else does."""

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


class HeldCopies:
    """Copies in `nbytes` of memory.

    Which one is needed last is known from a heap: when a copy is needed next changes only while it
    is locked, at its own use, and for all at once when a step begins.
    """

    def __init__(self, nbytes: int, trace: Trace) -> None:
        self._arena = Arena(max(0, nbytes))
        self._trace = trace
        self._held: dict[Copyable, _Copy] = {}
        self._locked: set[Copyable] = set()
        self._pinned: set[Copyable] = set()  # dirty: nowhere else yet
        self._stamps = itertools.count(1)
        self._heap: list[tuple[float, int, str, int, Copyable]] = []
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
        """All expectations have changed."""
        self._heap = []
        for piece in self._held:
            self._enter(piece)

    def work_on(self, *pieces: Copyable) -> None:
        """These copies cannot be given up from here on, those before can."""
        before, self._locked = self._locked, set(pieces)
        for piece in before:
            if piece in self._held:
                self._enter(piece)

    def pin(self, piece: Copyable) -> None:
        """Do not give the copy up until it is dropped."""
        self._pinned.add(piece)

    def demand(self, piece: Copyable) -> bool:
        """Make the copy, whatever has to go for it. Where all that is left is locked, the plan does
        not fit, and it is taken to pass through."""
        self._take(piece, None)
        return True

    def offer(self, piece: Copyable) -> bool:
        """Make the copy if there is room, or copies that are needed later than this one."""
        return self._take(piece, self._next_use(piece))

    def drop(self, piece: Copyable) -> None:
        """Give the copy up, if there is one."""
        self._pinned.discard(piece)
        copy = self._held.pop(piece, None)
        if copy is not None:
            self._arena.free(copy.offset)
            self._used[piece.state_class] -= piece.nbytes

    def _take(self, piece: Copyable, before: float | None) -> bool:
        if piece in self._held:
            return True
        offset = self._arena.allocate(piece.nbytes)
        if offset is None:
            offset = self._make_room(piece.nbytes, before)
        if offset is None:
            return False
        self._held[piece] = _Copy(offset)
        self._enter(piece)
        self._count(piece)
        return True

    def _count(self, piece: Copyable) -> None:
        self._used[piece.state_class] += piece.nbytes
        if self._arena.used_nbytes > self._most_nbytes:
            self._most_nbytes = self._arena.used_nbytes
            self.most = dict(self._used)

    def _make_room(self, nbytes: int, before: float | None) -> int | None:
        """Give up copies, the one needed last first, until `nbytes` fit; None where they do not."""
        kept = []
        offset = None
        while self._heap and offset is None:
            entry = heapq.heappop(self._heap)
            next_use, _, _, stamp, piece = entry
            copy = self._held.get(piece)
            if copy is None or copy.stamp != stamp:
                continue
            if piece in self._locked or piece in self._pinned:
                kept.append(entry)
                continue
            if before is not None and -next_use <= before:
                kept.append(entry)
                break
            self.drop(piece)
            self.evictions += 1
            offset = self._arena.allocate(nbytes)
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return offset

    def _enter(self, piece: Copyable) -> None:
        copy = self._held[piece]
        copy.stamp = next(self._stamps)
        entry = (-self._next_use(piece), -piece.nbytes, piece.name, copy.stamp, piece)
        heapq.heappush(self._heap, entry)

    def _next_use(self, piece: Copyable) -> float:
        """In uses from the start of this step. As the runtime has it, an update that is pending
        counts as one of the next step's."""
        trace = self._trace
        if piece.state_class in (StateClass.PARAMETERS, StateClass.KV):
            use = trace.cursor + piece.passes * trace.next_use(piece.group)
            return use + MADE_HERE if piece.is_decoded else use
        return trace.cursor + trace.next_cycle_use(piece.group) + 0.5
