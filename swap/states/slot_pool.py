"""Slots: memory of one tier, leased to copies of pieces whose home is another tier.

A demand (its caller waits) may evict any clean copy, write dirty copies back, and wait for moves to
end. A prefetch may only evict a copy that is needed later than the prefetched one, and never waits.
Which copy goes first is decided by an `EvictionPolicy`.

Gradients exist nowhere else and are consumed soon: they stay while others have room, in at most
half of the memory. A prefetch that finds no room starts to write back the gradients needed last.

On a machine that is short of memory, copies get less than the whole tier: up to a limit, beyond
which only a demand gets a lease.

Dequantized values need a slot several times as large as what is stored. The largest such slot is
kept for the next values: bytes prefetched into it would be evicted at once, and read again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from offload.swap.states.eviction import CachedPiece, EvictionPolicy, FurthestNextUse
from offload.tiers.ledger import StateClass

if TYPE_CHECKING:
    from offload.tiers.memory_tier import Lease, MemoryTier

# Added to the next use of a copy that was made from other bytes in memory (dequantized weights): it
# is evicted before any copy that would have to be read again.
MADE_HERE = 1e9


class SlotPool:
    """Leases memory of `tier`, evicting copies to make room. Thread-safe."""

    def __init__(
        self, tier: MemoryTier, lock: threading.RLock, policy: EvictionPolicy | None = None
    ) -> None:
        """`policy` decides what is evicted from this pool alone; None for `FurthestNextUse`."""
        self.tier = tier
        self.lock = lock
        self._policy = FurthestNextUse() if policy is None else policy
        self._held: dict[int, CachedPiece] = {}
        self._may_write_back: dict[int, CachedPiece] = {}  # dirty, and stay until room is needed
        self._held_nbytes = self._staying_nbytes = 0  # of all copies; of `_may_write_back`
        self._written_back: CachedPiece | None = None  # the last one written back for a prefetch
        self._values: CachedPiece | None = None  # the largest slot of dequantized values
        # bytes of the tier beyond which nothing is fetched ahead; a demand may exceed them
        self.limit_nbytes: int | None = None
        self.makes_values = False  # the last values that were used were dequantized here
        self._is_prefetching = False  # a prefetch is looking for room
        # Waits until another user releases copies; False if none will. Set by the owner of the work
        # that holds views of copies (the update queue).
        self.await_progress: Callable[[], bool] = lambda: False
        self.uses_left: Callable[[], float] = lambda: math.inf  # until the step's end; set as above
        self.evictions = 0

    def keep_within(self, limit_nbytes: int | None) -> None:
        """Set the limit, and evict copies that are not needed now until it holds. Gradients, which
        may stay in half of the limit, are written back as they come."""
        with self.lock:
            self.limit_nbytes = limit_nbytes
            self._evict_to_limit(0)

    def _evict_to_limit(self, nbytes: int) -> None:
        """Evict clean copies until `nbytes` more are within the limit."""
        limit = self.limit_nbytes
        while limit is not None and self.tier.used_nbytes + nbytes > limit:
            # none that is needed now, or two of those would take turns
            piece = self._policy.next_victim(self._held, before=0.0)
            if piece is None:
                return
            self._evict(piece)

    def _evict(self, piece: CachedPiece) -> None:
        piece.evict()
        self.evictions += 1

    def register(self, piece: CachedPiece) -> None:
        """Record that `piece` holds a copy now (under the lock)."""
        if id(piece) not in self._held:
            self._held[id(piece)] = piece
            self._held_nbytes += piece.held_nbytes

    def unregister(self, piece: CachedPiece) -> None:
        """Record that `piece` is about to release its copy (under the lock)."""
        del self._held[id(piece)]
        self._held_nbytes -= piece.held_nbytes
        if self._values is piece:
            self._values = None
        self._end_stay(piece, piece.held_nbytes)

    def may_write_back(self, piece: CachedPiece) -> None:
        """Let a dirty `piece` stay until its room is needed, or until half of the memory for copies
        is dirty: prefetches need clean copies to evict (under the lock)."""
        if id(piece) not in self._may_write_back:
            self._may_write_back[id(piece)] = piece
            self._staying_nbytes += piece.held_nbytes
        room = self._most_nbytes() - self.tier.used_nbytes + self._held_nbytes
        if self._staying_nbytes <= room // 2:
            return
        for each in self._policy.write_back_order(self._may_write_back.values()):
            each.write_back()
            if each.can_evict() or each.transit() is not None:
                self._end_stay(each, each.held_nbytes)
                if self._staying_nbytes <= room // 2:
                    return

    def _most_nbytes(self) -> int:
        budget = self.tier.arena.nbytes
        return budget if self.limit_nbytes is None else min(budget, self.limit_nbytes)

    def _end_stay(self, piece: CachedPiece, nbytes: int) -> None:
        if self._may_write_back.pop(id(piece), None) is not None:
            self._staying_nbytes -= nbytes

    def keep_for_values(self, piece: CachedPiece) -> None:
        """Record that `piece` holds values dequantized in this memory (under the lock)."""
        self.makes_values = True
        if self._values is None or self._values.held_nbytes <= piece.held_nbytes:
            self._values = piece

    def keep_no_values(self, nbytes: int) -> None:
        """Record that values of `nbytes` were not dequantized when used (under the lock)."""
        self.makes_values = False
        if self._values is not None and self._values.held_nbytes <= nbytes:
            self._values = None

    def is_kept(self, piece: CachedPiece) -> bool:
        """Whether the slot of `piece` is kept for the next values (under the lock)."""
        return self._is_prefetching and piece is self._values

    def offer_for_values(self, nbytes: int, owner: str, state_class: StateClass) -> Lease | None:
        """Return a lease, as `offer` does, for values that are needed now: if there is no room, the
        largest values dequantized before are evicted."""
        with self.lock:
            lease = self._lease(nbytes, owner, state_class)
            if lease is None and self._values is not None and self._values.can_evict():
                self._evict(self._values)
            return lease or self._lease_or_evict(nbytes, owner, state_class, before=-1.0)

    def empty(self) -> None:
        """Take every copy home and evict it; waits. Copies of which a view is alive stay."""
        while True:
            with self.lock:
                for piece in [each for each in self._held.values() if each.can_evict()]:
                    piece.evict()
                wait = self._write_back_for_demand()
            if wait is None:
                return
            wait()

    def demand(self, nbytes: int, owner: str, state_class: StateClass) -> Lease:
        """Return a lease, evicting any copy that can be evicted; may wait for write-backs.

        Raises TierFullError, listing what is held, when every copy left is in use.
        """
        while True:
            with self.lock:
                self._evict_to_limit(nbytes)
                lease = self._lease_or_evict(nbytes, owner, state_class, before=None)
                if lease is not None:
                    return lease
                wait = self._write_back_for_demand()
                again = any(piece.can_evict() for piece in self._held.values())
            if wait is not None:
                wait()
            elif not again and not self.await_progress():
                break
        with self.lock:  # memory may have been released since; free ranges in pieces do now, too
            lease = self._lease_or_evict(nbytes, owner, state_class, before=None)
            return lease or self.tier.lease(nbytes, owner=owner, state_class=state_class)

    def offer(
        self, nbytes: int, owner: str, state_class: StateClass, *, next_use: float
    ) -> Lease | None:
        """Return a lease if there is room, or if copies needed after `next_use` can be evicted."""
        with self.lock:
            self._is_prefetching = next_use >= 0
            try:
                lease = self._lease_or_evict(nbytes, owner, state_class, before=next_use)
                while lease is None and self._write_back_for_prefetch(state_class, next_use):
                    lease = self._lease_or_evict(nbytes, owner, state_class, before=next_use)
                return lease
            finally:
                self._is_prefetching = False

    def _write_back_for_prefetch(self, state_class: StateClass, before: float) -> bool:
        """Start to write back a piece that is needed after `before`, to make room for what the
        model computes with. Return whether it was written and evicted at once. (For an
        optimizer record this would save a read and cost a write.)"""
        if not self._may_write_back or state_class is StateClass.OPTIMIZER:
            return False
        if before >= self.uses_left():  # the step may make room before that use
            return False
        if self._written_back is not None and self._written_back.transit() is not None:
            return False  # its room is waited for
        for piece in self._policy.write_back_order(self._may_write_back.values()):
            if not self._policy.may_make_room(piece, before):
                return False
            piece.write_back()
            if piece.can_evict():
                self._evict(piece)
                return True
            if piece.transit() is not None:
                self._written_back = piece
                return False
        return False

    def _lease_or_evict(
        self, nbytes: int, owner: str, state_class: StateClass, before: float | None
    ) -> Lease | None:
        """Return a lease, evicting copies that are needed after `before`; any, if that is None."""
        needed = before is None
        lease = self._lease(nbytes, owner, state_class, needed=needed)
        if lease is not None:
            return lease
        while (piece := self._policy.next_victim(self._held, before)) is not None:
            self._evict(piece)
            lease = self._lease(nbytes, owner, state_class, needed=needed)
            if lease is not None:
                return lease
        return None

    def _lease(
        self, nbytes: int, owner: str, state_class: StateClass, *, needed: bool = False
    ) -> Lease | None:
        if not self.tier.fits(nbytes):
            return None
        if not needed and self.tier.used_nbytes + nbytes > self._most_nbytes():
            return None
        return self.tier.lease(nbytes, owner=owner, state_class=state_class)

    def _write_back_for_demand(self) -> Callable[[], object] | None:
        """Start to write back a dirty copy. Return a function that waits until a move ends, or None
        if nothing moves."""
        for piece in self._policy.write_back_order(self._held.values()):
            if piece.transit() is None:
                piece.write_back()
            if piece.can_evict():  # written already
                return lambda: None
            wait = piece.transit()
            if wait is not None:
                return wait
        return None
