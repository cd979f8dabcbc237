"""Memory that is given back for a while; what it held is kept in the next tier until then.

Leases, offsets and books stay: the same bytes come back to the same places, at other addresses of a
device. (vLLM's sleep mode does this for one allocator, whose virtual addresses stay.)
"""

from collections.abc import Callable
from functools import partial

import torch

from offload.swap.device.device_slot import Links
from offload.swap.io.block_store import BlockStore
from offload.swap.states.slot_pool import SlotPool
from offload.tiers.errors import StateError, TierFullError
from offload.tiers.ledger import StateClass
from offload.tiers.memory_tier import Lease, MemoryTier

_BLOCK_NBYTES = 16 << 20
# bytes that count during one move alone; `TierManager.save` refuses activations that do
_SCRATCH = (StateClass.STAGING, StateClass.ACTIVATIONS)


class AwayTier:
    """A memory tier that gives its memory back. Meanwhile no call of the model and no update is
    under way, and nothing leases or reads memory of the tier."""

    def __init__(self, tier: MemoryTier, to: SlotPool | BlockStore, links: Links) -> None:
        """What counts goes to host memory, over the links, or to swap files from host memory."""
        self.tier = tier
        self.has_left = False
        self._to = to
        self._links = links
        # functions that bring a lease's bytes back, and that free what they were copied to
        self._saved: list[tuple[Lease, Callable[[], object], Callable[[], object]]] = []

    def save(self) -> None:
        """Copy every byte that counts. Raises StateError for memory that the program still views,
        TierFullError or StorageError if there is no room for it."""
        for lease in self.tier.leases:
            if lease.state_class in _SCRATCH:
                continue
            if lease.in_use():
                raise StateError(
                    f"{lease.owner}: its {self.tier.name} memory cannot be given back, as the "
                    "program has a tensor that is a view of it (.data, detach(), the graph of a "
                    "forward, a KV cache); drop that, or keep a copy (.clone())"
                )
            if isinstance(self._to, SlotPool):
                self._copy(lease, self._to)
            else:
                self._write(lease, self._to)

    def _copy(self, lease: Lease, pool: SlotPool) -> None:
        copy = pool.demand(lease.extent.nbytes, f"{lease.owner}, asleep", lease.state_class)
        here, there = self._links.to_host, self._links.to_device
        bring = lambda: there.copy(lease.tensor.view(torch.uint8), copy.tensor).wait()  # noqa: E731
        self._saved.append((lease, bring, copy.free))
        here.copy(copy.tensor, lease.tensor.view(torch.uint8)).wait()

    def _write(self, lease: Lease, store: BlockStore) -> None:
        size = lease.extent.nbytes
        for start in range(0, size, _BLOCK_NBYTES):
            pages = lease.pages(start, min(start + _BLOCK_NBYTES, size))
            write = store.write(pages, owner=lease.owner, state_class=lease.state_class)
            block = write.wait()
            bring = partial(lambda *what: store.read(*what).wait(), block, pages)
            self._saved.append((lease, bring, partial(store.free, block)))

    def come_back(self) -> None:
        """Take memory again, with what was saved. Raises TierFullError if others use it."""
        try:
            self.tier.come_back()
        except torch.OutOfMemoryError as error:
            name, budget = str(self.tier.name), self.tier.account.budget_nbytes
            raise TierFullError(
                name, "all that it held before", budget, 0, budget,
                "others use that memory: let them free it (an engine of inference can sleep, too), "
                "and call engine.restore_device() again",
            ) from error  # fmt: skip
        for lease, bring, _ in self._saved:
            if not lease.freed:
                bring()
        self.has_left = False

    def forget(self) -> None:
        """Free what was saved (under the lock of the tiers)."""
        while self._saved:
            self._saved.pop()[2]()
