"""Which copies are evicted: those with the furthest next use, or as another policy decides."""

import threading
from collections.abc import Iterable, Mapping, Sequence

import pytest

from offload.planning.step.planned_states import PlannedState, PlannedTier
from offload.swap.states.eviction import CachedPiece, EvictionPolicy
from offload.swap.states.slot_pool import SlotPool
from offload.tiers.ledger import StateClass
from offload.tiers.tier import PAGE_NBYTES

COPIES = 200  # so many that one scan finds several victims
USES = [(3 + 7 * n) % COPIES for n in range(COPIES)]  # each once


class FirstIn:
    """Evicts the copy that came first, whenever it is needed."""

    def next_victim(
        self, held: Mapping[int, CachedPiece], before: float | None
    ) -> CachedPiece | None:
        return next((piece for piece in held.values() if piece.can_evict()), None)

    def may_make_room(self, piece: CachedPiece, before: float | None) -> bool:
        return True

    def write_back_order(self, pieces: Iterable[CachedPiece]) -> Sequence[CachedPiece]:
        return list(pieces)


def copy_in(pool: SlotPool, use: int) -> PlannedState:
    return PlannedState(str(use), PAGE_NBYTES, StateClass.PARAMETERS, pool, lambda: use)


def full(policy: EvictionPolicy | None = None) -> tuple[SlotPool, list[PlannedState]]:
    """A pool, and copies that fill it."""
    pool = SlotPool(PlannedTier(COPIES * PAGE_NBYTES), threading.RLock(), policy)  # type: ignore[arg-type]
    copies = [copy_in(pool, use) for use in USES]
    assert all(copy.take(copy.next_use()) for copy in copies)
    return pool, copies


@pytest.mark.parametrize(
    ("policy", "order"), [(None, sorted(USES, reverse=True)), (FirstIn(), USES)]
)
def test_a_pool_evicts_in_the_order_of_its_policy(
    policy: EvictionPolicy | None, order: list[int]
) -> None:
    pool, copies = full(policy)
    evicted = []
    for _ in range(10):
        assert copy_in(pool, 0).take(0)
        evicted += [copy.next_use() for copy in copies if not copy.is_held]
        copies = [copy for copy in copies if copy.is_held]
    assert evicted == order[:10]


def test_a_prefetch_evicts_nothing_that_is_needed_before_it() -> None:
    pool, copies = full()
    assert not copy_in(pool, COPIES).take(COPIES - 1)
    assert all(copy.is_held for copy in copies)
    assert copy_in(pool, COPIES).take(COPIES - 2)
    assert [copy.next_use() for copy in copies if not copy.is_held] == [COPIES - 1]
