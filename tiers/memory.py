"""The bytes behind a memory tier: one address range, handed out as tensors without a copy.

`HostMemory` reserves address space only: a page costs RAM when it is first touched, so a generous
budget costs nothing until it is used. For a GPU the range is registered once, as a whole, so that
every copy from it is asynchronous (a caching pinned allocator would round sizes up by up to 1.9x).
"""

from __future__ import annotations

import logging
import mmap
from typing import Protocol

import torch

from offload.tiers import accelerator
from offload.tiers.errors import BudgetError, UnsupportedError
from offload.tiers.units import format_bytes

_log = logging.getLogger("offload")
_MAP_NORESERVE = 0x4000  # Linux; the mmap module names it from Python 3.13 on


class Memory(Protocol):
    """An address range. Tensors of it are bytes (uint8), each with a storage of its own."""

    def tensor(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """A new uint8 tensor over `[offset_bytes, offset_bytes + nbytes)`, not a copy.

        Each call makes a new storage: its use count then tells whether any view of this range is
        still alive, in which case a slot must not be leased again.
        """
        ...

    def view(self, offset_bytes: int, nbytes: int) -> memoryview:
        """The same range for a file transfer. Unlike a tensor it does not count as a use."""
        ...

    def close(self) -> None: ...


class HostMemory:
    """Anonymous memory, page-aligned; pinned for `pin_for`, where that is an accelerator."""

    def __init__(self, nbytes: int, *, pin_for: torch.device | None = None) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._map = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=flags)
        except OSError as error:
            raise BudgetError(
                f"cannot reserve {format_bytes(nbytes)} of address space for the host tier "
                f"({error}); lower budget.host or raise `ulimit -v`"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _advise_huge_pages(self._map)
        self._pinned_for = pin_for if pin_for and _pin(self._map, nbytes, pin_for) else None

    @property
    def pinned(self) -> bool:
        return self._pinned_for is not None

    @torch.inference_mode(False)  # a lease taken in an evaluation may serve training later on
    def tensor(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=offset_bytes, count=nbytes)

    def view(self, offset_bytes: int, nbytes: int) -> memoryview:
        return memoryview(self._map)[offset_bytes : offset_bytes + nbytes]

    def close(self) -> None:
        """Unpin. The pages go when the last tensor over them goes."""
        device, self._pinned_for = self._pinned_for, None
        if device is not None:
            accelerator.of(device).unregister(_address(self._map), device)


def _advise_huge_pages(region: mmap.mmap) -> None:
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # a kernel built without transparent huge pages
        _log.debug("huge pages not advised: %s", error)


def _address(region: mmap.mmap) -> int:
    return torch.frombuffer(region, dtype=torch.uint8, count=1).data_ptr()


def _pin(region: mmap.mmap, nbytes: int, device: torch.device) -> bool:
    if not accelerator.is_accelerator(device):
        return False
    reason = accelerator.of(device).register(_address(region), nbytes, device)
    if reason is not None:
        _log.warning(
            "host tier: %s could not be pinned (%s), copies to the %s device will be slower; "
            "lower budget.host or raise `ulimit -l`",
            format_bytes(nbytes), reason, accelerator.of(device).title,
        )  # fmt: skip
    return reason is None


class DeviceMemory:
    """GPU memory taken once, in one piece."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device = device
        self._block = torch.empty(max(nbytes, 512), dtype=torch.uint8, device=device)

    @torch.inference_mode(False)  # as above
    def tensor(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        address = self._block.data_ptr() + offset_bytes
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, nbytes)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def view(self, offset_bytes: int, nbytes: int) -> memoryview:
        raise UnsupportedError("files are read into host memory, never into GPU memory directly")

    def close(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device=self._device)
