"""Host memory for saved activations: one lease, cut into slots.

The sizes of activations are not known beforehand. In an arena of their own they cannot
leave holes in the memory that parameters and gradients are counted on to fit into.
"""

from __future__ import annotations

import torch

from offload.tiers.arena import Arena
from offload.tiers.memory_tier import Lease
from offload.tiers.tier import PAGE_NBYTES


class WindowSlot:
    """A range of the window: whole pages. Freed once."""

    __slots__ = ("_window", "nbytes", "offset_bytes", "tensor")

    def __init__(self, window: ActivationWindow, offset_bytes: int, nbytes: int) -> None:
        self._window = window
        self.offset_bytes = offset_bytes
        self.nbytes = nbytes
        stop = offset_bytes + nbytes
        self.tensor = window.lease.part(offset_bytes, stop)  # 1D uint8, a storage of its own

    def pages(self) -> memoryview:
        """The range for a file transfer; not counted by `in_use`."""
        return self._window.lease.pages(self.offset_bytes, self.offset_bytes + self.nbytes)

    def in_use(self) -> bool:
        """True while any tensor besides the slot's own is a view of this range."""
        storage = self.tensor.untyped_storage()
        return int(torch._C._storage_Use_Count(storage._cdata)) > 2  # `self.tensor` and `storage`

    def free(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._window.arena.free(self.offset_bytes)


class ActivationWindow:
    """Slots of one lease of host memory. Not thread-safe: its users hold one lock."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.arena = Arena(lease.extent.nbytes)

    @property
    def nbytes(self) -> int:
        return self.arena.nbytes

    @property
    def piece_nbytes(self) -> int:
        """Most bytes of one slot: larger tensors move in pieces, so that one leaves while the
        next is filled."""
        return max(PAGE_NBYTES, self.nbytes // 4 // PAGE_NBYTES * PAGE_NBYTES)

    def take(self, nbytes: int) -> WindowSlot | None:
        """A slot of at least `nbytes`, content undefined; None where no hole is that large."""
        offset = self.arena.allocate(nbytes)
        if offset is None:
            return None
        return WindowSlot(self, offset, self.arena.size_of(offset))
