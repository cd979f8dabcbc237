"""Saved tensors that move to another tier as in `swap/activations`, simulated without moving.

The rules are the same as there: storages of 128 KiB and more move whole, each once, unless only a
small part of one is saved; inputs, parameters and buffers stay. What comes back is a new storage.
On a CPU it counts only if it may be larger than a slot of the window; a smaller one is used in
place in the window.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from offload.planning.activations.pass_watch import LiveBytes
from offload.planning.activations.valueless import WithoutValues
from offload.planning.plan.plan import LEAST_WINDOW_NBYTES
from offload.swap.activations import LEAST_NBYTES, WHOLE
from offload.swap.activations.activations import span_of

_LEAST_SLOT_NBYTES = LEAST_WINDOW_NBYTES // 4


class _LeftStorage:
    """The bytes of a moved storage; it stays on the device while other tensors refer to it."""

    def __init__(self, storage: torch.UntypedStorage, version: int, span: tuple[int, int]) -> None:
        self.version = version
        self.start_bytes, self.stop_bytes = span
        self.there = weakref.ref(storage)
        self.there_start_bytes = 0  # where the storage that is there begins, of the first one

    def covers(self, storage: torch.UntypedStorage, version: int, span: tuple[int, int]) -> bool:
        inside = self.start_bytes <= span[0] and span[1] <= self.stop_bytes
        return self.there() is storage and self.version == version and inside


@dataclass(frozen=True, slots=True)
class _LeftTensor:
    owner: SavedElsewhere
    record: _LeftStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int  # of the first storage

    def tensor(self) -> Tensor:
        storage = self.owner.bring_back(self.record)
        offset = (self.offset_bytes - self.record.there_start_bytes) // self.dtype.itemsize
        with no_dispatch():  # a mode without values refuses storages
            empty = torch.empty(0, dtype=self.dtype, device=storage.device)
            tensor = empty.set_(storage, offset, self.shape, self.stride)
        mode = self.owner.values
        return tensor if mode is None else FakeTensor(mode, tensor, "cpu")


class SavedElsewhere:
    """Implements the keeper of saved activations (`zero/hooks/handles.py`)."""

    def __init__(
        self, live: LiveBytes, values: WithoutValues | None = None, *, in_place: bool
    ) -> None:
        """`live` knows which storages count. `values` is the mode of a pass without values.
        `in_place`: the model computes on the CPU, where the window is."""
        self.values = values
        self._live = live
        self._in_place = in_place
        self._left: weakref.WeakValueDictionary[int, _LeftStorage] = weakref.WeakValueDictionary()

    def keep(self, tensor: Tensor) -> _LeftTensor | None:
        """Move the tensor away; return None if it stays."""
        if tensor.layout is not torch.strided or (tensor.is_leaf and tensor.requires_grad):
            return None
        span = span_of(tensor)
        if span[1] - span[0] < LEAST_NBYTES or not self._live.nbytes_of(tensor):
            return None
        record = self._record_of(tensor.untyped_storage(), tensor._version, span)
        offset = int(tensor.storage_offset()) * tensor.itemsize
        return _LeftTensor(self, record, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def _record_of(
        self, storage: torch.UntypedStorage, version: int, span: tuple[int, int]
    ) -> _LeftStorage:
        record = self._left.get(storage._cdata)
        if record is None or not record.covers(storage, version, span):
            if storage.nbytes() <= WHOLE * (span[1] - span[0]):
                span = 0, storage.nbytes()
            record = self._left[storage._cdata] = _LeftStorage(storage, version, span)
        return record

    def bring_back(self, record: _LeftStorage) -> torch.UntypedStorage:
        """Return the record's bytes where the model computes."""
        found = record.there()
        if found is None:
            nbytes = record.stop_bytes - record.start_bytes
            in_window = self._in_place and nbytes <= _LEAST_SLOT_NBYTES
            with self._live.counting(not in_window):
                # zeros, where there are values at all: indices have to be some
                found = torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()
            record.there = weakref.ref(found)
            record.there_start_bytes = record.start_bytes
        return found
