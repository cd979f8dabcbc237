"""The base of states that borrow memory from a `SlotPool`: the slot they hold."""

from __future__ import annotations

import abc
from collections.abc import Callable

from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import State
from offload.tiers.errors import StateError
from offload.tiers.ledger import StateClass
from offload.tiers.memory_tier import Lease
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import round_up


class SlotState(State):
    """A state that may have a copy in a slot of `pool`, whose lock guards its fields."""

    def __init__(
        self, name: str, nbytes: int, piece_nbytes: int, pool: SlotPool,
        next_use: Callable[[], float], edge_nbytes: int | None = None,
        stride_nbytes: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, nbytes, piece_nbytes, edge_nbytes, stride_nbytes)
        self._pool = pool
        self._lock = pool.lock
        self._next_use = next_use
        self._slot: Lease | None = None

    @property
    def held_nbytes(self) -> int:
        return self._slot.extent.nbytes if self._slot is not None else 0

    def next_use(self) -> float:
        return self._next_use()

    def _lease_slot(self, next_use: float | None, state_class: StateClass) -> Lease | None:
        """Lease memory for a slot. With a `next_use` (see `prefetch`), None if there is no room."""
        size = round_up(self.nbytes, PAGE_NBYTES)
        if next_use is None:
            return self._pool.demand(size, self.name, state_class)
        return self._pool.offer(size, self.name, state_class, next_use=next_use)

    def evict(self) -> None:
        """Give the slot back; StateError if none is held."""
        slot = self._slot
        if slot is None:
            raise StateError(f"{self.name} holds no memory to evict")
        is_lost = self._may_still_be_filled()
        self._forget_arrival()
        self._pool.unregister(self)
        self._slot = None
        if not is_lost:
            slot.free()

    def _may_still_be_filled(self) -> bool:
        """Whether a read into the slot was given up: it may yet return and write to that memory."""
        return False

    @abc.abstractmethod
    def _forget_arrival(self) -> None:
        """Forget the slot, which is gone, and the transfers into it."""

    @abc.abstractmethod
    def can_evict(self) -> bool: ...

    @abc.abstractmethod
    def write_back(self) -> None: ...

    @abc.abstractmethod
    def transit(self) -> Callable[[], object] | None: ...


class CachedState(SlotState):
    """A state whose home is another state. Its slot is never dirty: what is written there goes home
    at once."""

    def __init__(
        self, home: State, name: str, nbytes: int, piece_nbytes: int, pool: SlotPool,
        next_use: Callable[[], float], edge_nbytes: int | None = None,
        stride_nbytes: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, nbytes, piece_nbytes, pool, next_use, edge_nbytes, stride_nbytes)
        self._home = home

    def write_back(self) -> None:
        """Do nothing."""

    def discard(self) -> None:
        with self._lock:
            if self._slot is not None:
                self.evict()
        self._home.discard()

    def close(self) -> None:
        self.discard()
        self._home.close()
