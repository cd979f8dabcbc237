"""Parameters that are views of one memory without being one object.

Each parameter gets a place of its own in its group's buffer, so a write to one would not show in
the other any more. One object in several places is a tied weight and needs nothing of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from offload.tiers.errors import UnsupportedError
from offload.zero.tensors.local_tensors import memory_of

_MOST_WORK = 1_000_000  # of NumPy's exact answer; beyond it counts as shared
_SOMEWHERE = 1 << 20  # the address of a storage without memory: NumPy takes 0 for none


def refuse_shared_views(model: nn.Module) -> None:
    """Raise UnsupportedError for two parameters, or a trainable one and a buffer, with an element
    in common; on the meta device, where each would get values of its own, also for other buffers.
    Parts of one memory that are apart are fine."""
    for a, b in _touching(model):
        if not _shares(a, b):
            continue
        if a.is_parameter and b.is_parameter:
            raise UnsupportedError(
                f"{a.name} and {b.name} are two parameters with the same memory, or a part of it, "
                "and a write to one would not show in the other any more; to tie them, let both "
                "be one object (module.weight = other.weight), otherwise give one of them a copy "
                "(.clone())"
            )
        other, buffer = (b, a) if b.is_parameter else (a, b)
        if other.memory.is_meta:
            raise UnsupportedError(
                f"buffer {buffer.name} shares memory with {other.name} on the meta device, and "
                "each would get values of its own; let both be one object, or give the buffer a "
                "copy (.clone())"
            )
        if other.trainable:
            raise UnsupportedError(
                f"buffer {buffer.name} shares memory with the parameter {other.name}, and what "
                "training does to one would not show in the other any more; compute it in the "
                "forward, or give the buffer a copy (.clone())"
            )


class _View:
    """A tensor of the model that has memory, and the addresses of its first and behind its last
    byte: on the meta device, where there are none, within its storage."""

    def __init__(self, name: str, tensor: torch.Tensor, memory: torch.Tensor) -> None:
        self.name = name
        self.memory = memory
        self.is_parameter = isinstance(tensor, nn.Parameter)
        self.trainable = tensor.requires_grad
        last = sum((n - 1) * s for n, s in zip(memory.shape, memory.stride(), strict=True))
        on_meta = memory.is_meta
        self.storage = memory.untyped_storage()._cdata if on_meta else 0  # addresses count from
        offset = int(memory.storage_offset()) * memory.element_size()
        self.start = _SOMEWHERE + offset if on_meta else memory.data_ptr()
        self.stop = self.start + (last + 1) * memory.element_size()


def _touching(model: nn.Module) -> Iterator[tuple[_View, _View]]:
    """Pairs whose ranges of addresses overlap, one of them a parameter or on the meta device."""
    active: list[_View] = []
    for view in sorted(_views(model), key=lambda view: (view.storage, view.start)):
        active = [e for e in active if e.storage == view.storage and e.stop > view.start]
        asked = view.is_parameter or view.memory.is_meta
        yield from ((each, view) for each in active if asked or each.is_parameter)
        active.append(view)


def _views(model: nn.Module) -> Iterator[_View]:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        memory = memory_of(tensor)
        if memory is None or isinstance(tensor, nn.parameter.UninitializedBuffer):
            continue
        if memory.layout is torch.strided and memory.numel():
            yield _View(name, tensor, memory)


def _shares(a: _View, b: _View) -> bool:
    """Whether two strided tensors have an element in common."""
    try:
        shares: Any = np.shares_memory  # its types know no other work than none or any
        return bool(shares(np.asarray(_Addresses(a)), np.asarray(_Addresses(b)), _MOST_WORK))
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """An array for NumPy to reason about and not to read: the memory may be a GPU's, or none."""

    def __init__(self, view: _View) -> None:
        tensor, itemsize = view.memory, view.memory.element_size()
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (view.start, True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * itemsize for stride in tensor.stride()),
            "typestr": f"|V{itemsize}",
        }
