"""Memory that is given back for a while; what it held is kept in the next tier until then.

Leases, offsets and books stay: the same bytes come back to the same places, at other addresses of a
device. (vLLM's sleep mode does this for one allocator, whose virtual addresses stay.)
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial

import torch

from offload.swap.device.device_slot import Links
from offload.swap.io.block_store import BlockStore, StoredBlock
from offload.swap.states.slot_pool import SlotPool
from offload.swap.threads.transfer import all_of
from offload.tiers.errors import StateError, TierFullError
from offload.tiers.memory_tier import Lease, MemoryTier
from offload.zero.tensors.local_tensors import hold, memory_of

_BLOCK_NBYTES = 16 << 20


class AwayTier:
    """A memory tier that gives its memory back. Meanwhile no call of the model and no update is
    under way, and nothing leases or reads memory of the tier."""

    def __init__(self, tier: MemoryTier, to: SlotPool | BlockStore, links: Links) -> None:
        """What counts goes to host memory, over the links, or to swap files from host memory."""
        self.tier = tier
        self.has_left = False
        self._to = to
        self._links = links
        self._copies: list[tuple[Lease, Lease]] = []  # each lease with that of its copy,
        self._blocks: list[tuple[Lease, dict[int, StoredBlock]]] = []  # or with blocks by offset

    def save(self) -> None:
        """Copy every byte that counts. Raises StateError for memory that the program still views,
        TierFullError or StorageError if there is no room for it."""
        with ExitStack() as unless_saved:
            unless_saved.callback(self.forget)
            for lease in [lease for lease in self.tier.leases if not lease.is_scratch]:
                if lease.in_use():
                    raise StateError(
                        f"{lease.owner}: its {self.tier.name} memory cannot be given back, as the "
                        "program has a tensor that is a view of it (.data, detach(), the graph of "
                        "a forward, a KV cache); drop that, or keep a copy (.clone())"
                    )
                self._save(lease)
            unless_saved.pop_all()

    def _save(self, lease: Lease) -> None:
        to, size = self._to, lease.extent.nbytes
        if isinstance(to, SlotPool):
            copy = to.demand(size, f"{lease.owner}, while asleep", lease.state_class)
            self._copies.append((lease, copy))
            self._links.to_host.copy(copy.tensor, lease.tensor.view(torch.uint8)).wait()
            return
        blocks: dict[int, StoredBlock] = {}
        self._blocks.append((lease, blocks))
        with ExitStack() as ended:  # also where the files are full half-way
            for start in range(0, size, _BLOCK_NBYTES):
                write = to.write(
                    lease.pages(start, min(start + _BLOCK_NBYTES, size)), owner=lease.owner,
                    state_class=lease.state_class, committed=partial(blocks.__setitem__, start),
                )  # fmt: skip
                ended.callback(write.wait)

    def leave(self) -> None:
        """Give the tier's memory back; what it held was saved."""
        self.has_left = True
        self.tier.leave()

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
        for lease, copy in self._copies:
            if not lease.freed:
                self._links.to_device.copy(lease.tensor.view(torch.uint8), copy.tensor).wait()
        for lease, blocks in self._blocks:
            if not lease.freed and isinstance(self._to, BlockStore):
                reads = [
                    self._to.read(block, lease.pages(start, start + block.nbytes))
                    for start, block in blocks.items()
                ]
                all_of(reads).wait()
        self.has_left = False

    def forget(self) -> None:
        """Free what was saved."""
        for _, copy in self._copies:
            if isinstance(self._to, SlotPool):
                with self._to.lock:
                    copy.free()
        for block in [block for _, blocks in self._blocks for block in blocks.values()]:
            if isinstance(self._to, BlockStore):
                self._to.free(block)
        self._copies, self._blocks = [], []


def move_to(device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
    """Let tensors have their values on `device`; those that share memory share it there."""
    moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    with torch.inference_mode(False), torch.no_grad():
        for tensor in tensors:
            memory = memory_of(tensor)
            if memory is None or memory.layout is not torch.strided:
                tensor.data = tensor.data.to(device)
                continue
            old = memory.untyped_storage()
            if old._cdata not in moved:
                flat = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(old)
                moved[old._cdata] = old, flat.to(device).untyped_storage()
            there = torch.empty(0, dtype=memory.dtype, device=device)
            place = memory.storage_offset(), memory.size(), memory.stride()
            hold(tensor, there.set_(moved[old._cdata][1], *place))
