"""The state of a block besides its parameters: buffers and attributes.

Recomputation, which runs a block once more than its model does, restores this state for that run,
and keeps the run's changes out of the model:

    forward        BlockState(block), keep ▶ the block's forward ▶ settle
    once more      with installed(): the block's forward, on copies

Given back are buffers, and of the attributes of the block's modules tensors, containers (list,
dict, set, deque; their items are not copied) and attributes that the forward assigns: plain
numbers, `training`. Changes inside any other object that an attribute refers to (a counter in an
object of its own, a tensor in a list) are not covered.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

# A copy this small is kept without checking whether it was needed: the check waits for a GPU and
# costs more than the copy.
KEPT_NBYTES = 64 << 10

_NOT_STATE = (frozenset(vars(nn.Module())) - {"training"}) | {
    "forward", "_apply", "_compiled_call_impl"
}  # fmt: skip
_PLAIN = (torch.Tensor, FakeTensor)
_CONTAINERS = frozenset({list, dict, set, deque, bytearray, OrderedDict, defaultdict, Counter})


@dataclass(slots=True)
class _ModuleState:
    module: nn.Module
    path: str
    attributes: dict[str, Any]
    buffers: dict[str, torch.Tensor | None]

    @classmethod
    def of(cls, module: nn.Module, path: str) -> _ModuleState:
        attributes = {name: v for name, v in vars(module).items() if name not in _NOT_STATE}
        return cls(module, path, attributes, dict(module._buffers))

    def exchanged(self, new: Callable[[Any], Any]) -> _ModuleState:
        attributes = {name: new(value) for name, value in self.attributes.items()}
        buffers = {name: new(value) for name, value in self.buffers.items()}
        return _ModuleState(self.module, self.path, attributes, buffers)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in (*self.buffers.items(), *self.attributes.items()):
            if isinstance(value, torch.Tensor):
                yield f"{self.path}.{name}" if self.path else name, value

    def put(self) -> None:
        """Give the module this state, and remove everything else."""
        own = vars(self.module)
        for name in own.keys() - self.attributes.keys() - _NOT_STATE:
            del own[name]
        own.update(self.attributes)
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)


@dataclass(slots=True)
class _Watched:
    """A tensor that was not copied: the forward must not change it."""

    name: str
    tensor: torch.Tensor
    version: int


class BlockState:
    """Buffers and attributes of a block's modules as they are when this is made."""

    def __init__(self, block: nn.Module) -> None:
        self._modules = [_ModuleState.of(each, path) for path, each in block.named_modules()]
        self._exchange(_without_graph)
        uncopied = [(name, t) for name, t in self._tensors() if not _is_copied(t)]
        self._watched = [
            _Watched(name, tensor, tensor._version)
            for name, tensor in (*block.named_parameters(), *uncopied)
            if not tensor.is_inference()
        ]
        self._kept: dict[int, torch.Tensor] = {}  # copies, by the id of what they are copies of

    def keep(self) -> None:
        """Copy what a forward may change; call `settle` after that forward."""
        self._kept = _copies(tensor for _, tensor in self._tensors())
        self._exchange(lambda value: _copied(value, {}))

    def settle(self) -> None:
        """Drop the copies of large tensors that the forward, which is over, left as they were."""
        for name, tensor in self._tensors():
            kept = self._kept.get(id(tensor))
            is_large = kept is not None and kept.nbytes > KEPT_NBYTES and not kept.is_inference()
            if kept is not None and is_large and _same_bits(kept, tensor):
                del self._kept[id(tensor)]
                self._watched.append(_Watched(name, tensor, tensor._version))
        self._exchange(lambda value: self._kept.get(id(value), value))
        self._kept = {}

    def changed(self) -> list[str]:
        """Return the names of parameters and uncopied tensors that were changed in place since."""
        return [each.name for each in self._watched if each.tensor._version != each.version]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the block has copies of this state; afterwards its present one."""
        assert not self._kept, "settled"
        now = [_ModuleState.of(each.module, each.path) for each in self._modules]
        copies = _copies(tensor for _, tensor in self._tensors())
        try:
            for each in self._modules:
                each.exchanged(lambda value: _copied(value, copies)).put()
            yield
        finally:
            for each in now:
                each.put()

    def _exchange(self, new: Callable[[Any], Any]) -> None:
        self._modules = [each.exchanged(new) for each in self._modules]

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor once, with one of its names."""
        seen: set[int] = set()
        for name, tensor in chain.from_iterable(each.tensors() for each in self._modules):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def _without_graph(value: Any) -> Any:
    """Return a detached copy: its graph would let tensors kept by one pass keep the pass before."""
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _is_copied(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
    return plain and not tensor.requires_grad and not tensor.is_quantized


def _copies(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return copies of the tensors that can be copied, by id. Shared memory stays shared."""
    by_memory: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if _is_copied(tensor):
            by_memory.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    copies: dict[int, torch.Tensor] = {}
    for views in by_memory.values():
        if len(views) == 1 or isinstance(views[0], FakeTensor):
            copies.update((id(view), view.clone()) for view in views)
        else:
            memory = views[0].untyped_storage().clone()
            for view in views:
                place = view.storage_offset(), view.shape, view.stride()
                copies[id(view)] = view.detach().new_empty(0).set_(memory, *place)
    return copies


def _copied(value: Any, copies: Mapping[int, torch.Tensor]) -> Any:
    return copy.copy(value) if type(value) in _CONTAINERS else copies.get(id(value), value)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare two tensors; without values nothing differs. Kernels that change a tensor do not
    always count it (batch norm), so versions would not tell."""
    if isinstance(a, FakeTensor) or a.is_meta:
        return True
    flat_a, flat_b = (each.reshape(-1).view(torch.uint8) for each in (a, b))
    return torch.equal(flat_a, flat_b)
