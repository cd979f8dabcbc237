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


def refuse_shared_views(model: nn.Module) -> None:
    """Raise UnsupportedError for two parameters, or a trainable one and a buffer, with an element
    in common. Parts of one memory that are apart are fine."""
    for a, b in _touching(model):
        if not _shares(a.memory, b.memory):
            continue
        if a.is_parameter and b.is_parameter:
            raise UnsupportedError(
                f"{a.name} and {b.name} are two parameters with the same memory, or a part of it, "
                "and a write to one would not show in the other any more; to tie them, let both "
                "be one object (module.weight = other.weight), otherwise give one of them a copy "
                "(.clone())"
            )
        param, buffer = (a, b) if a.is_parameter else (b, a)
        if param.trainable:
            raise UnsupportedError(
                f"buffer {buffer.name} shares memory with the parameter {param.name}, and what "
                "training does to one would not show in the other any more; compute it in the "
                "forward, or give the buffer a copy (.clone())"
            )


class _View:
    """A tensor of the model that has memory, and the addresses of its first and behind its last
    byte."""

    def __init__(self, name: str, tensor: torch.Tensor, memory: torch.Tensor) -> None:
        self.name = name
        self.memory = memory
        self.is_parameter = isinstance(tensor, nn.Parameter)
        self.trainable = tensor.requires_grad
        last = sum((n - 1) * s for n, s in zip(memory.shape, memory.stride(), strict=True))
        self.start = memory.data_ptr()
        self.stop = self.start + (last + 1) * memory.element_size()


def _touching(model: nn.Module) -> Iterator[tuple[_View, _View]]:
    """Yield pairs, one of them a parameter, whose ranges of addresses overlap."""
    active: list[_View] = []
    for view in sorted(_views(model), key=lambda view: view.start):
        active = [each for each in active if each.stop > view.start]
        yield from ((each, view) for each in active if each.is_parameter or view.is_parameter)
        active.append(view)


def _views(model: nn.Module) -> Iterator[_View]:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        memory = memory_of(tensor)
        if memory is None or isinstance(tensor, nn.parameter.UninitializedBuffer):
            continue
        if memory.layout is torch.strided and not memory.is_meta and memory.numel():
            yield _View(name, tensor, memory)


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two strided tensors have an element in common."""
    try:
        shares: Any = np.shares_memory  # its types know no other work than none or any
        return bool(shares(np.asarray(_Addresses(a)), np.asarray(_Addresses(b)), _MOST_WORK))
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """An array for NumPy to reason about and not to read: the memory may be a GPU's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        itemsize = tensor.element_size()
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * itemsize for stride in tensor.stride()),
            "typestr": f"|V{itemsize}",
        }
