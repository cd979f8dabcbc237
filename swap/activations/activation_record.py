"""The record of one saved storage: its pieces, and where each of them is.

             filled            write begins            write done
(device) ───────────▶ DIRTY ───────────────▶ LEAVING ─────────────▶ CLEAN ◀──────┐
                        ▲                       │                     │ evicted   │ read done
                        └───── write failed ────┘                     ▼           │
                                                                   ABSENT ──▶ ARRIVING
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.swap.activations.activation_window import WindowSlot
from offload.swap.device.streams import StreamEvent
from offload.swap.io.block_store import StoredBlock
from offload.swap.threads.transfer import Transfer
from offload.tiers.accelerator import Stream
from offload.tiers.tier import Residency


@dataclass(slots=True, weakref_slot=True, eq=False)
class Token:
    """Held by everything that was packed from one storage. Its death frees the bytes."""

    number: int


@dataclass(slots=True, eq=False)
class SavedPiece:
    """A range of a saved storage that moves in one transfer."""

    number: int  # the record's: a larger one was saved later and is needed earlier
    offset_bytes: int
    nbytes: int
    slot: WindowSlot | None = None
    copied: StreamEvent = field(default_factory=StreamEvent)  # the slot's last copy, in or out
    block: StoredBlock | None = None
    write: Transfer[Any] | None = None
    arrival: Transfer[None] | None = None
    dead: bool = False

    @property
    def residency(self) -> Residency:
        if self.slot is None:
            return Residency.ABSENT
        if self.write is not None:
            return Residency.LEAVING
        if self.block is None:
            return Residency.DIRTY
        return Residency.ARRIVING if self.arrival is not None else Residency.CLEAN


class WeakMemory:
    """A 1D uint8 tensor that does not keep its storage alive."""

    __slots__ = ("_device", "_offset_bytes", "_reference", "_storage_nbytes", "nbytes")

    def __init__(self, flat: torch.Tensor) -> None:
        storage = flat.untyped_storage()
        self._reference = StorageWeakRef(storage)
        self._device = flat.device
        self._offset_bytes = int(flat.storage_offset())
        self._storage_nbytes = storage.nbytes()
        self.nbytes = flat.numel()

    @property
    def key(self) -> int:
        """The storage's identity: no other storage has it while this object lives."""
        return int(self._reference.cdata)

    def revive(self) -> torch.Tensor | None:
        """The tensor, if other code keeps its storage alive and at its size."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        if storage is None or storage.nbytes() != self._storage_nbytes:
            return None
        return bytes_of(storage, self._device, self._offset_bytes, self.nbytes)


def bytes_of(
    storage: torch.UntypedStorage, device: torch.device, start: int, nbytes: int
) -> torch.Tensor:
    """1D uint8 over bytes `[start, start + nbytes)` of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, start, (nbytes,), (1,))


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """A copy out of or into device memory that PyTorch has given out.

    Memory that is freed goes at once to what `stream` is given next, without a wait: PyTorch orders
    by the stream that memory was made on, whatever thread frees it.
    """

    memory: torch.Tensor
    mark: StreamEvent
    stream: Stream | None  # that of `memory`; None where work is done when it returns


@dataclass(slots=True, eq=False)
class SavedStorage:
    """Bytes `[start_bytes, start_bytes + nbytes)` of a storage as they were at `version`."""

    number: int
    device: torch.device
    start_bytes: int
    nbytes: int
    version: int
    token: weakref.ref[Token]
    on_device: WeakMemory  # the storage that was saved, later the one that was given out last
    pieces: list[SavedPiece] = field(default_factory=list)
    complete: bool = False  # all pieces are there
    given_out: bool = False  # `on_device` is what was given out
    given_to: Stream | None = None  # ... to this stream, which has waited for its arrival
    ahead: DeviceCopy | None = None  # brought to the device before its use

    def covers(self, start_bytes: int, stop_bytes: int, version: int, itemsize: int) -> bool:
        """Whether a tensor over that range of the storage can be made from this record."""
        inside = self.start_bytes <= start_bytes and stop_bytes <= self.start_bytes + self.nbytes
        aligned = (start_bytes - self.start_bytes) % itemsize == 0
        return self.complete and self.version == version and inside and aligned
