"""Memory for copies of states whose home is elsewhere, lent by a pool. Predictions use it, too,
which do without PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from offload.swap.states.slot_pool import SlotPool
from offload.swap.threads.transfer import Transfer, is_stuck
from offload.tiers.errors import StateError
from offload.tiers.ledger import StateClass
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import round_up

if TYPE_CHECKING:
    import torch

    from offload.tiers.memory_tier import Lease


class SlotUser:
    """The state that a slot is lent to. It is asked with the pool's lock held. This base class is
    for a slot of which nothing goes home, and whose transfers the slot itself knows."""

    def may_evict(self) -> bool:
        """Whether the home has all that the slot holds, and it is not being filled. The slot itself
        checks its views and the transfers into it."""
        return True

    def evicted(self) -> None:
        """Forget what was in the slot, which is about to be given back."""

    def write_back(self) -> None:
        """Start to take home what the slot alone holds."""

    def transit(self) -> Callable[[], object] | None:
        """Return a function that waits until the slot's moves end; None if nothing moves."""
        return None


class Slot:
    """Memory of `pool` that one state borrows at times. It is what the pool evicts (`CachedPiece`),
    and the pool's lock guards its fields."""

    user = SlotUser()  # set by the state that it is made for

    def __init__(
        self, name: str, nbytes: int, state_class: StateClass, pool: SlotPool,
        next_use: Callable[[], float],
    ) -> None:  # fmt: skip
        """`next_use` returns the number of uses until the state's next one."""
        self.name = name
        self.nbytes = nbytes
        self.state_class = state_class
        self.pool = pool
        self.lock = pool.lock
        self.next_use = next_use
        self.lease: Lease | None = None
        self.held_nbytes = 0
        self.arrivals: dict[int, Transfer[None]] = {}  # into the slot, by piece

    # ---------------------------------------------------------------- what the pool asks
    def can_evict(self) -> bool:
        lease = self.lease
        if lease is None or not self.user.may_evict():
            return False
        return self.has_arrived() and not lease.in_use()

    def write_back(self) -> None:
        self.user.write_back()

    def transit(self) -> Callable[[], object] | None:
        return self.user.transit()

    def evict(self) -> None:
        """Give the memory back; StateError if none is held. Memory that a read which was given up
        may still fill is lost."""
        lease = self.lease
        if lease is None:
            raise StateError(f"{self.name} holds no memory to evict")
        is_lost = any(is_stuck(arrival) for arrival in self.arrivals.values())
        self._forget_moves()
        self.user.evicted()
        self.pool.unregister(self)
        self.lease, self.held_nbytes = None, 0
        if not is_lost:
            lease.free()

    def _forget_moves(self) -> None:
        self.arrivals.clear()

    def give_back(self) -> None:
        """Evict the slot, whatever it holds, if it has any memory."""
        with self.lock:
            if self.lease is not None:
                self.evict()

    # ---------------------------------------------------------------- what the state asks
    def request(self, next_use: float | None) -> Lease | None:
        """Lease memory for the slot, without the lock. With a `next_use` (see `State.prefetch`),
        return None if there is no room; with None make room, or raise TierFullError."""
        size = round_up(self.nbytes, PAGE_NBYTES)
        if next_use is None:
            return self.pool.demand(size, self.name, self.state_class)
        return self.pool.offer(size, self.name, self.state_class, next_use=next_use)

    def hold(self, lease: Lease) -> None:
        """Keep `lease` until evicted; free it if another is kept already (under the lock)."""
        if self.lease is not None:
            lease.free()
            return
        self.lease, self.held_nbytes = lease, lease.nbytes
        self.pool.register(self)

    def view(self) -> torch.Tensor:
        """The state's bytes (1D uint8) in the memory that is held."""
        assert self.lease is not None, "no memory is held"
        return self.lease.tensor[: self.nbytes]

    def pages(self, span: slice) -> memoryview:
        """The whole pages of a span in the memory that is held: what direct I/O moves."""
        assert self.lease is not None, "no memory is held"
        return self.lease.pages(span.start, round_up(span.stop, PAGE_NBYTES))

    def in_use(self) -> bool:
        """Whether a view of the memory is alive."""
        return self.lease is not None and self.lease.in_use()

    def has_arrived(self) -> bool:
        return not self.arrivals or all(arrival.done() for arrival in self.arrivals.values())

    # ---------------------------------------------------------------- what a device does with it
    def note_read(self) -> None:
        """A view is given out, to whatever the model computes with (under the lock)."""

    def mark_reads(self) -> None:
        """Look for reads of slots that have ended: the model uses something now."""

    def begin_write(self) -> None:
        """Order the model's writing to the slot from here on after what works there; it counts as
        a read (under the lock)."""
