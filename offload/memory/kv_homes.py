"""Homes for the pages of KV caches, within the part of the budgets that everything else leaves;
and the store of a model's caches on them."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable

from torch import nn

from offload.kv.store import KVStore
from offload.memory.tier_manager import TierManager
from offload.planning.plan.kv_plan import KVPlan
from offload.planning.plan.plan import Plan, kv_room_nbytes
from offload.process import machine
from offload.swap.states.fetching import Fetcher
from offload.swap.states.state import State
from offload.tiers.cached_layer import CachedLayer
from offload.tiers.errors import StateError, TierFullError, UnsupportedError
from offload.tiers.memory_tier import Lease
from offload.tiers.tier import PAGE_NBYTES, TIERS, Tier
from offload.tiers.units import round_up
from offload.zero.groups.store import WeightStore


class KVHomes:
    """Places pages by the shares of `placement.kv`, counted in bytes as they come and go."""

    def __init__(self, tier_manager: TierManager, plan: Plan, kv: KVPlan) -> None:
        self.lock: threading.RLock = tier_manager.lock
        self._tier_manager = tier_manager
        self._kv = kv
        self._room = {tier: kv_room_nbytes(plan, tier) for tier in TIERS}
        self._held: Counter[Tier] = Counter()  # pages, and memory to compute with
        self._pages: Counter[Tier] = Counter()
        self._tiers: dict[int, tuple[Tier, int]] = {}  # of each page, by the id of its state

    def kv_page(self, name: str, nbytes: int, next_use: Callable[[], float]) -> State:
        tier, size = self._tier_of_next(nbytes), round_up(nbytes, PAGE_NBYTES)
        self._check_room(tier, size, name)
        state = self._tier_manager.kv_page(tier, name, nbytes, next_use)
        self._held[tier] += size
        self._pages[tier] += size
        self._tiers[id(state)] = tier, size
        return state

    def free_kv_page(self, state: State) -> None:
        tier, size = self._tiers.pop(id(state))
        self._held[tier] -= size
        self._pages[tier] -= size
        state.close()

    def kv_memory(self, name: str, nbytes: int) -> Lease:
        self._check_room(self._kv.computing, round_up(nbytes, PAGE_NBYTES), name)
        lease = self._tier_manager.kv_memory(name, nbytes)
        self._held[self._kv.computing] += lease.extent.nbytes
        return lease

    def free_kv_memory(self, lease: Lease) -> None:
        self._held[self._kv.computing] -= lease.extent.nbytes
        self._tier_manager.free_kv_memory(lease)

    def _tier_of_next(self, nbytes: int) -> Tier:
        """Return the tier that is furthest behind its share."""
        whole = sum(self._pages.values()) + nbytes
        shares = self._kv.placement.shares
        return max(shares, key=lambda each: each[1] * whole - self._pages[each[0]])[0]

    def _check_room(self, tier: Tier, nbytes: int, owner: str) -> None:
        room, held = self._room[tier], self._held[tier]
        if held + nbytes > room:
            others = [str(other) for other in tier.slower if other != tier]
            elsewhere = f", have more of placement.kv on {' or '.join(others)}" if others else ""
            raise TierFullError(
                str(tier), owner, nbytes, max(0, room - held), room,
                f"raise budget.{tier}{elsewhere}, or set kv.dtype: int8 (the rest of the budget is "
                "needed by weights); a smaller batch or fewer tokens need less",
            )  # fmt: skip


def cached_layers(model: nn.Module) -> tuple[CachedLayer, ...]:
    """Return the model's cached layers. Raises UnsupportedError if no KV cache is known."""
    layers: tuple[CachedLayer, ...] = ()
    if "transformers" in sys.modules:  # else it is none of its models
        from offload.kv import paged_cache

        layers = paged_cache.cached_layers(model)
    if not layers:
        raise UnsupportedError(
            f"placement.kv: {type(model).__name__} has no KV cache that offload knows (those of "
            "transformers' models are); remove placement.kv"
        )
    return layers


def keep_caches(
    model: nn.Module, store: WeightStore, tier_manager: TierManager, plan: Plan, kv: KVPlan,
    fetcher: Fetcher, *, int8: bool, trains: bool,
) -> KVStore:  # fmt: skip
    """Keep the KV caches that `model` is called with in the tiers of `kv`, until `store` is closed;
    where it `trains`, only those of calls without gradients. Pages are prefetched by `fetcher`."""
    from offload.kv import paged_cache  # imports transformers, as the model did

    weights, closed = weakref.ref(store), store.closed  # a cache may outlive the model

    def check_usable() -> None:
        live = weights()
        if live is None:
            raise StateError(closed)
        live.check_usable()

    caches = KVStore(
        KVHomes(tier_manager, plan, kv), fetcher, store.device,
        room_nbytes=kv_room_nbytes(plan, kv.computing), page_nbytes=kv.page_nbytes,
        tokens=kv.tokens if kv.page_nbytes else 0, layers=kv.layers, int8=int8,
        session=store.one_thread, check_usable=check_usable,
        trim=machine.trim_memory if store.device.type == "cpu" else None,
    )  # fmt: skip
    store.on_close.append(paged_cache.install(model, caches, trains=trains))
    return caches
