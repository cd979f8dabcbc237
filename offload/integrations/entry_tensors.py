"""Tensors that have values only while torch.distributed.checkpoint writes them to a file, or reads
them from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from offload.tiers.errors import UnsupportedError

Slices = tuple[Any, ...]  # arguments of torch.ops.aten.slice, one after the other


@dataclass(frozen=True)
class Entry:
    """A whole tensor of an engine, or of a checkpoint, which is read-only."""

    access: Callable[..., AbstractContextManager[None]]
    nbytes: int
    get: Callable[[], Tensor]
    put: Callable[[Tensor], None] | None = None

    def read(self, where: Slices) -> Tensor:
        """Return a copy of the values."""
        with self.access(self.nbytes, changes=False):
            whole = self.get()
            return _sliced(whole, where).clone() if where else whole

    def write(self, where: Slices, value: Tensor) -> None:
        put = self.put
        if put is None:
            raise UnsupportedError("a checkpoint's tensors are not written to")
        with self.access(self.nbytes, changes=True):
            if not where:
                put(value)
                return
            whole = self.get()
            _sliced(whole, where).copy_(value)
            put(whole)


def _sliced(tensor: Tensor, where: Slices) -> Tensor:
    for each in where:
        tensor = torch.ops.aten.slice.Tensor(tensor, *each)
    return tensor


class EntryTensor(Tensor):
    """An entry, or a slice of it, whose values are read when an operation needs them; `copy_` into
    it writes them."""

    entry: Entry
    at: Slices
    like: Tensor  # of the same shape, on the meta device

    @staticmethod
    def __new__(cls, entry: Entry, at: Slices, like: Tensor) -> EntryTensor:
        # It has a storage of the tensor's size, without memory. DCP clones a tensor whose storage
        # has another size, and keeps all that it has written until the end.
        made: EntryTensor = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=torch.device("cpu")
        )
        made.entry, made.at, made.like = entry, at, like
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor for `torch.save`."""
        return self.entry.read(self.at).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        raise UnsupportedError(
            "EngineState cannot be copied, as async_save does: the copies would hold all states in "
            "RAM; use dcp.save, or give async_save what get_state_dict(model, optimizer) returns"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        aten, this = torch.ops.aten, args[0]
        if func is aten.copy_.default and isinstance(this, EntryTensor):
            this.entry.write(this.at, args[1].expand(this.shape))
            return this
        if func in (aten.detach.default, aten.alias.default):
            return EntryTensor(this.entry, this.at, this.like)
        if func is aten.slice.Tensor:
            return EntryTensor(this.entry, (*this.at, args[1:]), _sliced(this.like, (args[1:],)))
        if func is aten.is_pinned.default:
            return False
        if func._schema.is_mutable:
            raise UnsupportedError(f"{func}: states are read by operations and written by copy_")
        given = (args, dict(kwargs or {}))
        args, kwargs = tree_map_only(EntryTensor, lambda each: each.entry.read(each.at), given)
        return func(*args, **kwargs)
