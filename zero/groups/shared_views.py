"""Parameters that are views of one memory without being one object.

Each parameter gets a place of its own in its group's buffer, so a write to one would not show in
the other any more. One object in several places is a tied weight and needs nothing of this.

`refuse_shared_views` looks at a model before its parameters go to tiers, `AssignedMemory` at what
`.data` of a parameter in tiers is set to afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

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


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the meta device at the same place of its storage."""
    shape = tensor.shape, tensor.stride()
    made = torch.empty_strided(*shape, dtype=tensor.dtype, device=torch.device("meta"))
    return made.as_strided(*shape, int(tensor.storage_offset()))


class Memory:
    """The memory in which plain PyTorch would keep the values of one or several parameters."""

    def __init__(self, storage: StorageWeakRef | None = None) -> None:
        self.storage = storage  # held: its address is not given to another storage meanwhile
        self.holders: dict[int, tuple[str, _View | None]] = {}  # by the parameter's id

    def sharing(self) -> tuple[str, str] | None:
        """Return the names of two parameters with an element in common. A view that is unknown is
        taken for the whole."""
        for (a, one), (b, other) in combinations(self.holders.values(), 2):
            if one is None or other is None or _shares(one, other):
                return a, b
        return None


class AssignedMemory:
    """What `.data` of parameters in tiers was set to.

    `b.data = a.data` lets both share memory in plain PyTorch. In tiers each keeps values of its
    own, so that is refused; not at once, since `a.data, b.data = b.data, a.data` begins with it,
    but by `check`, before the values are used.
    """

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}  # by the parameter's id
        self._of_storages: dict[int, Memory] = {}  # by the storage's address
        self._is_checked = True

    def of(self, param: nn.Parameter, name: str) -> Memory:
        """Return the memory that a parameter's values are in."""
        found = self._memories.get(id(param))
        if found is None:
            found = self._memories[id(param)] = Memory()
            found.holders[id(param)] = name, None
        return found

    def assign(self, param: nn.Parameter, name: str, value: torch.Tensor | Memory | None) -> None:
        """Note that `param.data` is set to a tensor, or to another parameter's memory; None: to
        memory that no parameter has."""
        self._forget(param)
        view = None
        if isinstance(value, torch.Tensor):
            view = _View(name, param, _without_memory(value))
            value = self._of_storage(value)
        if value is not None:
            self._memories[id(param)] = value
            value.holders[id(param)] = name, view
            self._is_checked = False

    def _forget(self, param: nn.Parameter) -> None:
        found = self._memories.pop(id(param), None)
        if found is not None:
            del found.holders[id(param)]
            if found.storage is not None and not found.holders:
                del self._of_storages[found.storage.cdata]

    def _of_storage(self, tensor: torch.Tensor) -> Memory:
        storage = StorageWeakRef(tensor.untyped_storage())
        return self._of_storages.setdefault(storage.cdata, Memory(storage))

    def check(self) -> None:
        """Raise UnsupportedError if two parameters were given the same memory."""
        if self._is_checked:
            return
        for memory in set(self._memories.values()):
            found = memory.sharing()
            if found is not None:
                raise UnsupportedError(
                    f"{found[0]} and {found[1]} were given the same memory, or a part of it, by "
                    "setting .data; in tiers each has values of its own, and a write to one would "
                    "not show in the other; give one of them a copy (.data = other.data.clone()), "
                    "or tie them before offload.initialize or offload.dispatch (module.weight = "
                    "other.weight)"
                )
        self._is_checked = True
