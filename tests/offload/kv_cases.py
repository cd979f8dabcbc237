"""Homes for KV caches alone: pages in memory and in files in turn, without a model's weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from offload.kv.store import KVStore
from offload.swap.io.block_store import BlockStore
from offload.swap.io.swap_file import SwapFile
from offload.swap.io.threads_backend import ThreadsBackend
from offload.swap.states.cached_file_state import CachedFileState
from offload.swap.states.fetching import Fetcher
from offload.swap.states.memory_state import MemoryState
from offload.swap.states.slot import Slot
from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import State
from offload.tiers.file_tier import FileTier
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import Lease, MemoryTier
from offload.tiers.tier import Tier
from offload.tiers.units import round_up


@dataclass
class Homes:
    """A page in each of `tiers` in turn."""

    folder: Path
    tiers: tuple[Tier, ...]
    host_nbytes: int = 8 << 20
    nvme_nbytes: int = 64 << 20
    made: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        memory = HostMemory(self.host_nbytes)
        self.host = MemoryTier(Tier.HOST, self.host_nbytes, memory, self.ledger)
        self.pool = SlotPool(self.host, self.lock)
        tier = FileTier(self.nvme_nbytes, [1.0], self.ledger)
        self.files = BlockStore([SwapFile(self.folder)], tier, ThreadsBackend(), lock=self.lock)

    def kv_page(self, name: str, nbytes: int, next_use: Callable[[], float]) -> State:
        tier = self.tiers[self.made % len(self.tiers)]
        self.made += 1
        size = round_up(nbytes, 4096)
        if tier.is_file:
            slot = Slot(name, nbytes, StateClass.KV, self.pool, next_use)
            return CachedFileState(self.files, slot, size)
        return MemoryState(name, nbytes, size, self.kv_memory(name, nbytes))

    def free_kv_page(self, state: State) -> None:
        state.close()

    def kv_memory(self, name: str, nbytes: int) -> Lease:
        return self.pool.demand(nbytes, name, StateClass.KV)

    def free_kv_memory(self, lease: Lease) -> None:
        with self.lock:
            lease.free()

    def store(self, *, int8: bool = False, page_tokens: int | None = 3, depth: int = 4) -> KVStore:
        store = KVStore(
            self, Fetcher(depth), torch.device("cpu"), room_nbytes=self.host_nbytes, int8=int8
        )
        if page_tokens is not None:
            usual = store.format
            store.format = lambda *shape: replace(usual(*shape), tokens=page_tokens)  # type: ignore[method-assign]
        return store

    def held(self) -> dict[str, int]:
        with self.lock:
            self.ledger.check_integrity()
            return {str(tier): each.used_nbytes for tier, each in self.ledger.accounts.items()}

    def close(self) -> None:
        self.files.close()
        self.host.close()
