"""The bytes behind a memory tier: one address range, handed out as tensors without a copy.

`HostMemory` reserves address space only: a page costs RAM when it is first touched, so a generous
budget costs nothing until it is used. For a GPU ranges are pinned as they are first used, in large
extents (`tiers/pinning.py`), so that every copy from them is asynchronous (a caching pinned
allocator would round sizes up by up to 1.9x).

Where nothing is pinned, more addresses are reserved than the budget has bytes: a lease for which
the free bytes suffice, but in no single piece, gets addresses behind the budget's own, and the
pages of free ranges are given back for it (`MemoryTier.lease`).
"""

from abc import ABC, abstractmethod
from contextlib import suppress

import torch

from offload.tiers import accelerator
from offload.tiers.errors import BudgetError, UnsupportedError
from offload.tiers.host_region import HostRegion
from offload.tiers.pinning import Pins
from offload.tiers.units import format_bytes

_MIN_BLOCK_NBYTES, _MAX_BLOCKS = 64 << 10, 1 << 16  # in which it is known what was touched
_BEYOND = 3  # times the budget: addresses behind it, which cost nothing


class Memory(ABC):
    """An address range. Tensors of it are bytes (uint8), each with a storage of its own."""

    beyond_nbytes = 0  # addresses behind the budget's, for leases that find no free range
    gives_back = False  # whether `give_back` does anything

    @abstractmethod
    def tensor(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """A new uint8 tensor over `[offset_bytes, offset_bytes + nbytes)`, not a copy.

        Each call makes a new storage: its use count then tells whether any view of this range is
        still alive, in which case a slot must not be leased again.
        """

    @abstractmethod
    def view(self, offset_bytes: int, nbytes: int) -> memoryview:
        """The same range for a file transfer. Unlike a tensor it does not count as a use."""

    @property
    @abstractmethod
    def touched_nbytes(self) -> int:
        """The number of bytes of pages that cost RAM, at most: in whole blocks."""

    def give_back(self, start: int, stop: int) -> None:  # noqa: B027 - not all memory can
        """Give back the RAM of `[start, stop)`, as far as possible; it is not read again."""

    def leave(self) -> None:  # noqa: B027 - as above
        """Give back all memory, as far as possible. No range is used before `take_again`."""

    def take_again(self) -> None:  # noqa: B027
        """Take all memory again, content undefined, perhaps at another address."""

    @abstractmethod
    def close(self) -> None: ...


class HostMemory(Memory):
    """Anonymous memory, page-aligned, which a forked child does not share; pinned for `pin_for`,
    where that is an accelerator."""

    def __init__(self, nbytes: int, *, pin_for: torch.device | None = None) -> None:
        pins = pin_for is not None and accelerator.is_accelerator(pin_for)
        self._region = _reserved(nbytes, 0 if pins else _BEYOND * nbytes)
        self._nbytes = nbytes
        self.beyond_nbytes = max(0, len(self._region) - nbytes)
        self._block_nbytes = max(_MIN_BLOCK_NBYTES, 1 << (nbytes // _MAX_BLOCKS).bit_length())
        # 1 where it was used
        self._touched = bytearray(-(-(nbytes + self.beyond_nbytes) // self._block_nbytes))
        self._touched_blocks = 0
        # not if it is pinned: a device goes on using the pages that it was told of, and unpinning
        # them waits for all of its work
        self.gives_back = not pins
        self._pins: Pins | None = None
        if pin_for is not None and pins:
            self._pins = Pins(self._region.address, len(self._region), pin_for)

    @property
    def pinned(self) -> bool:
        """Whether all that was handed out is pinned, and anything was."""
        return self._pins is not None and self._pins.complete

    def tensor(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        stop, pins = offset_bytes + nbytes, self._pins
        view = self._region.tensor(offset_bytes, stop)
        first, last = offset_bytes // self._block_nbytes, -(-stop // self._block_nbytes)
        self._touched_blocks += self._touched.count(0, first, last)
        self._touched[first:last] = b"\1" * (last - first)
        if pins is not None:
            pins.use(offset_bytes, stop)
        return view

    def view(self, offset_bytes: int, nbytes: int) -> memoryview:
        return memoryview(self._region)[offset_bytes : offset_bytes + nbytes]

    @property
    def touched_nbytes(self) -> int:
        pinned = 0 if self._pins is None else self._pins.nbytes  # in larger extents
        limit = self._nbytes + self.beyond_nbytes
        return max(pinned, min(limit, self._touched_blocks * self._block_nbytes))

    def give_back(self, start: int, stop: int) -> None:
        first, last = -(-start // self._block_nbytes), stop // self._block_nbytes
        if self.gives_back and self._region.drop(start, stop) and last > first:
            self._touched_blocks -= self._touched.count(1, first, last)
            self._touched[first:last] = bytes(last - first)

    def leave(self) -> None:
        """Unpin, and give back the RAM; addresses stay."""
        if self._pins is not None:
            self._pins.release()
        self._region.drop(0, len(self._region))
        self._touched, self._touched_blocks = bytearray(len(self._touched)), 0

    def close(self) -> None:
        """Unpin, and give back the RAM that no tensor views; the rest is freed with the last tensor
        over it. A closed engine's model keeps the leases themselves alive."""
        pins, self._pins = self._pins, None
        if pins is not None:
            pins.close()
        self._region.give_back()


def _reserved(nbytes: int, beyond_nbytes: int) -> HostRegion:
    """Addresses for both, or for `nbytes` alone where a limit leaves no more."""
    if beyond_nbytes:
        with suppress(OSError):
            region = HostRegion(nbytes + beyond_nbytes)
            region.advise_small_pages(nbytes)
            return region
    try:
        return HostRegion(nbytes)
    except OSError as error:
        raise BudgetError(
            f"cannot reserve {format_bytes(nbytes)} of address space for the host tier "
            f"({error}); lower budget.host or raise `ulimit -v`"
        ) from error


class DeviceMemory(Memory):
    """GPU memory taken once, in one piece."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device = device
        self._nbytes = max(nbytes, 512)
        self.take_again()

    def take_again(self) -> None:
        self._block = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)

    @torch.inference_mode(False)  # as above
    def tensor(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        address = self._block.data_ptr() + offset_bytes
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, nbytes)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def view(self, offset_bytes: int, nbytes: int) -> memoryview:
        raise UnsupportedError("files are read into host memory, never into GPU memory directly")

    @property
    def touched_nbytes(self) -> int:
        return self._block.numel()

    def leave(self) -> None:
        self.close()

    def close(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device=self._device)
