"""States without bytes, for the runtime's own scheduler: its `SlotPool` decides which copies are
kept and its `Fetcher` which parameters are fetched ahead, so that a plan predicts what a run does.

What a `FileState` or a `MirroredState` would move is counted instead, with two simplifications:
every move ends before the next one begins, and only the current group uses its copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from offload.swap.io.io_request import Priority
from offload.swap.states.slot_pool import SlotPool
from offload.tiers.arena import Arena
from offload.tiers.errors import TierFullError
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier

if TYPE_CHECKING:
    from offload.tiers.memory_tier import MemoryTier


@dataclass(slots=True)
class PlannedLease:
    """A range of a `PlannedTier`."""

    tier: PlannedTier
    nbytes: int
    state_class: StateClass
    offset: int | None  # None: in pieces

    def free(self) -> None:
        self.tier.give_back(self)


class PlannedTier:
    """What a `SlotPool` asks of a `MemoryTier`, without memory."""

    def __init__(self, nbytes: int) -> None:
        self.arena = Arena(max(0, nbytes))
        self.used_nbytes = self.peak_nbytes = 0
        self._used = dict.fromkeys(StateClass, 0)
        self.peak = dict(self._used)  # bytes by class, when all together were most

    @property
    def free_nbytes(self) -> int:
        return self.arena.nbytes - self.used_nbytes

    def fits(self, nbytes: int) -> bool:
        return nbytes <= min(self.free_nbytes, self.arena.largest_free_nbytes)

    def lease(self, nbytes: int, *, owner: str, state_class: StateClass) -> PlannedLease:
        """A range, possibly in pieces. Raises TierFullError."""
        if nbytes > self.free_nbytes:
            raise TierFullError(
                Tier.HOST, owner, nbytes, self.free_nbytes, self.arena.nbytes, "plan for less"
            )
        lease = PlannedLease(self, nbytes, state_class, self.arena.allocate(nbytes))
        self._used[state_class] += nbytes
        self.used_nbytes += nbytes
        if self.used_nbytes > self.peak_nbytes:
            self.peak_nbytes, self.peak = self.used_nbytes, dict(self._used)
        return lease

    def give_back(self, lease: PlannedLease) -> None:
        if lease.offset is not None:
            self.arena.free(lease.offset)
        self._used[lease.state_class] -= lease.nbytes
        self.used_nbytes -= lease.nbytes


def pool_of(nbytes: int) -> tuple[PlannedTier, SlotPool]:
    """A memory of `nbytes` for copies, and the runtime's pool over it."""
    tier = PlannedTier(nbytes)
    return tier, SlotPool(cast("MemoryTier", tier), threading.RLock())


class PlannedState:
    """A copy of a state in a pool, or of several that are alike, at home elsewhere."""

    def __init__(
        self, name: str, nbytes: int, state_class: StateClass, pool: SlotPool,
        next_use: Callable[[], float], chunks: int = 1,
    ) -> None:  # fmt: skip
        """`next_use` gives the uses from now; `chunks` is the number of pieces in a file."""
        self.name, self.nbytes, self.chunks = name, nbytes, chunks
        self.state_class, self.next_use = state_class, next_use
        self.is_locked = False  # in use, as by a view in the runtime
        self.filled: Callable[[], None] = lambda: None  # called when the copy is made
        self.sent: Callable[[], None] = lambda: None  # called when a dirty copy goes home
        self._pool = pool
        self._lease: PlannedLease | None = None
        self._is_dirty = self._is_leaving = False

    @property
    def is_held(self) -> bool:
        return self._lease is not None

    @property
    def held_nbytes(self) -> int:
        return self.nbytes if self._lease is not None else 0

    # ---------------------------------------------------------------- what the pool asks
    def can_drop(self) -> bool:
        return self._lease is not None and not (self.is_locked or self._is_dirty)

    def drop(self) -> None:
        """Give the copy up, if there is one."""
        if self._lease is not None:
            self._pool.unregister(self)
            self._lease.free()
            self._lease = None
            self._is_dirty = False

    def leave(self) -> None:
        if self._is_dirty and not self.is_locked:
            self._is_dirty, self._is_leaving = False, True
            self.sent()

    def transit(self) -> Callable[[], None] | None:
        """A wait that is over at once, after a copy has left."""
        leaving, self._is_leaving = self._is_leaving, False
        return (lambda: None) if leaving else None

    # ---------------------------------------------------------------- what uses it
    def bring(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        """Make the copy, as `State.bring` does."""
        return self.bring_at(next_use)

    def bring_at(self, next_use: float | None) -> bool:
        return self.take(next_use, fill=True)

    def take(self, next_use: float | None, *, fill: bool) -> bool:
        """Make the copy and, with `fill`, note that it was read. Where nothing else can go, the
        plan does not fit, and what is needed now only passes through."""
        if self._lease is not None or not self.nbytes:
            return True
        lease = None
        if next_use is not None:
            lease = self._pool.offer(self.nbytes, self.name, self.state_class, next_use=next_use)
            if lease is None:
                return False
        else:
            with suppress(TierFullError):
                lease = self._pool.demand(self.nbytes, self.name, self.state_class)
        if fill:
            self.filled()
        if lease is not None:
            self._lease = cast("PlannedLease", lease)
            self._pool.register(self)
        return True

    def write(self) -> None:
        """Change the copy: it is newer than its home, and stays until its room is needed."""
        self._is_dirty = True
        self._pool.may_leave(self)
