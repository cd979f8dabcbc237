"""A tier of addressable memory: `device` or `host`."""

from __future__ import annotations

import torch

from offload.tiers import accelerator
from offload.tiers.arena import Arena
from offload.tiers.errors import StateError, TierFullError
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import DeviceMemory, HostMemory, Memory
from offload.tiers.tier import PAGE_NBYTES, Extent, Tier
from offload.tiers.units import format_bytes, round_up

# Made once: making a tensor releases the GIL, and other threads then keep it for a while.
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class MemoryTier:
    """Leases of one memory, within a hard byte budget. Synchronous, not thread-safe."""

    def __init__(self, name: Tier, budget_nbytes: int, memory: Memory, ledger: Ledger) -> None:
        self.name = name
        self.arena = Arena(budget_nbytes)
        self._beyond = Arena(memory.beyond_nbytes)  # addresses behind those of `arena`
        self.account = ledger.open_account(name, budget_nbytes)
        ledger.audit(name, self.arena)
        ledger.audit(name, self._beyond)
        self._memory = memory
        self._leases: dict[int, Lease] = {}  # by offset

    @classmethod
    def open(
        cls, tier: Tier, budget_nbytes: int, device: torch.device, ledger: Ledger
    ) -> MemoryTier:
        """Open a tier beside `device`, in host memory unless the tier or an accelerator has its
        own."""
        if tier.open_memory is not None:
            memory = tier.open_memory(budget_nbytes, device)
        elif tier.on_device and accelerator.is_accelerator(device):
            memory = DeviceMemory(budget_nbytes, device)
        else:
            memory = HostMemory(budget_nbytes, pin_for=device)
        return cls(tier, budget_nbytes, memory, ledger)

    def lease(
        self, nbytes: int, *, owner: str, state_class: StateClass, in_parts: bool = False
    ) -> Lease:
        """The right to `nbytes` of this tier until freed. Raises TierFullError.

        The content is undefined. `in_parts`: only `Lease.part` and `Lease.pages` will be used of
        it, so that what is never used is never pinned. Where the free bytes suffice, but in no
        single piece, it lies behind the budget's addresses; the pages of free ranges are given
        back, so that the tier takes no more RAM than its budget.
        """
        size = round_up(max(nbytes, 1), PAGE_NBYTES)
        offset = self._allocate(size)
        if offset is None:
            raise self.full(nbytes, owner, state_class)
        self.account.move(state_class, size)
        lease = Lease(
            self, Extent(self.name, offset, size), nbytes, owner, state_class, in_parts=in_parts
        )
        self._leases[offset] = lease
        if self._beyond.used_nbytes:
            self._give_back_surplus()
        return lease

    def _allocate(self, size: int) -> int | None:
        if size > self.free_nbytes:
            return None
        offset = self.arena.allocate(size)
        if offset is None:
            offset = self._beyond.allocate(size)
            return None if offset is None else self.arena.nbytes + offset
        return offset

    def _give_back_surplus(self) -> None:
        """Give back the pages of free ranges, until the tier takes no more than its budget."""
        for start, stop in self.arena.free_ranges():
            if self.touched_nbytes <= self.arena.nbytes:
                return
            self._memory.give_back(start, stop)

    @property
    def used_nbytes(self) -> int:
        return self.arena.used_nbytes + self._beyond.used_nbytes

    @property
    def free_nbytes(self) -> int:
        return self.arena.nbytes - self.used_nbytes

    def fits(self, nbytes: int) -> bool:
        """True if a lease of `nbytes` finds a free range right now."""
        largest = min(self.free_nbytes, self.arena.largest_free_nbytes)
        return round_up(max(nbytes, 1), PAGE_NBYTES) <= largest

    def full(self, nbytes: int, owner: str, state_class: StateClass) -> TierFullError:
        what = "optimizer states" if state_class is StateClass.STAGING else str(state_class)
        slower = " or ".join(map(str, self.name.slower))
        remedy = f"raise budget.{self.name}" + (f" or move {what} to {slower}" if slower else "")
        largest = self.arena.largest_free_nbytes
        if self.free_nbytes >= round_up(max(nbytes, 1), PAGE_NBYTES) > largest:
            remedy += f" (free in pieces of at most {format_bytes(largest)})"
        return TierFullError(
            str(self.name), owner, nbytes, self.free_nbytes, self.account.budget_nbytes, remedy
        )

    def _free(self, lease: Lease) -> None:
        start, size = lease.extent.offset_bytes, lease.extent.nbytes
        del self._leases[start]
        if start < self.arena.nbytes:
            self.arena.free(start)
        else:
            self._beyond.free(start - self.arena.nbytes)
            self._memory.give_back(start, start + size)
        self.account.move(lease.state_class, -size)

    @property
    def touched_nbytes(self) -> int:
        """The bytes of memory that it takes now, including ranges that are free again."""
        return self._memory.touched_nbytes

    @property
    def gives_back(self) -> bool:
        """Whether free ranges can be given back before the tier is closed."""
        return self._memory.gives_back

    def give_back(self, start: int, stop: int) -> None:
        """Give back the memory of the range `[start, stop)`, if that is still free."""
        if self.arena.is_free(start, stop):
            self._memory.give_back(start, stop)

    @property
    def leases(self) -> list[Lease]:
        """All leases that are not freed."""
        return list(self._leases.values())

    def leave(self) -> None:
        """Give back all memory, whose bytes are lost; leases and books stay. A lease's tensor must
        not be used before `come_back`."""
        self._memory.leave()

    def come_back(self) -> None:
        """Take memory again, content undefined, and let the leases' tensors be over it."""
        self._memory.take_again()
        with torch.inference_mode(False):
            for lease in self._leases.values():
                if lease.tensor is not _NOTHING:  # else parts of it are made as they are used
                    lease.tensor.set_(lease.part(0, lease.extent.nbytes).untyped_storage())

    def close(self) -> None:
        self._memory.close()


class Lease:
    """The right to a range of a memory tier. Frees once.

    The code that starts a transfer keeps the lease until the transfer is done: a lease outlives
    every move into or out of it.
    """

    __slots__ = ("_tier", "extent", "freed", "nbytes", "owner", "state_class", "tensor")

    def __init__(
        self, tier: MemoryTier, extent: Extent, nbytes: int, owner: str, state_class: StateClass,
        *, in_parts: bool = False,
    ) -> None:  # fmt: skip
        self._tier = tier
        self.extent = extent
        self.nbytes = nbytes
        self.owner = owner
        self.state_class = state_class
        self.freed = False
        # 1D uint8, whole pages (direct I/O reads and writes whole pages), one storage of its own;
        # empty where it is used in parts
        self.tensor: torch.Tensor = (
            _NOTHING if in_parts
            else tier._memory.tensor(extent.offset_bytes, extent.nbytes)
        )  # fmt: skip

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Bytes `[start, stop)`, with a storage of their own, which is not counted as a use."""
        return self._tier._memory.tensor(self.extent.offset_bytes + start, stop - start)

    def pages(self, start: int, stop: int) -> memoryview:
        """Bytes `[start, stop)` of the range, for a file transfer; not counted by `in_use`."""
        offset = self.extent.offset_bytes
        return self._tier._memory.view(offset + start, stop - start)

    def in_use(self) -> bool:
        """True while any tensor besides the lease's own is a view of this range."""
        storage = self.tensor.untyped_storage()
        return int(torch._C._storage_Use_Count(storage._cdata)) > 2  # `self.tensor` and `storage`

    def free(self) -> None:
        """Give the range back. StateError when freed twice."""
        if self.freed:
            raise StateError(f"lease of {self.owner} freed twice")
        self.freed = True
        self.tensor = _NOTHING
        self._tier._free(self)
