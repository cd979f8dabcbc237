"""Tensors without values that claim to be on the CPU and note every write to them.

On the meta device some of torch's initialisers do nothing (`nn.init.trunc_normal_`, `orthogonal_`),
and code that looks at values fails. A shadow answers every question about values with zero or
False, and computes shapes on the meta device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_MOST_QUESTIONS = 1000  # about values, in one call: it may wait for an answer that never comes
# These write all of a tensor and read none of it.
_OVERWRITING = frozenset({"normal_", "uniform_", "fill_", "zero_", "random_", "exponential_"})


class Notes:
    """Notes which shadows, by key, were written to, and which first of all as a whole."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.read: set[object] = set()
        self.written: set[object] = set()
        self.overwritten: set[object] = set()
        self.questions = 0

    def write(self, shadow: Shadow, *, overwriting: bool) -> None:
        if overwriting and shadow.is_whole and shadow.key not in self.read | self.written:
            self.overwritten.add(shadow.key)
        self.written.add(shadow.key)

    def answer(self, dtype: torch.dtype) -> bool | int | float | complex:
        self.questions += 1
        if self.questions > _MOST_QUESTIONS:
            raise RuntimeError("an initialiser looks at values without end")
        return torch.zeros((), dtype=dtype).item()


class Shadow(torch.Tensor):
    """A tensor without values. `key` stands for its memory; None for a result."""

    meta: torch.Tensor
    key: object
    notes: Notes
    is_whole: bool  # not a part of that memory

    @staticmethod
    def __new__(
        cls, meta: torch.Tensor, notes: Notes, key: object = None, *, is_whole: bool = True
    ) -> Shadow:
        shadow: Shadow = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=torch.device("cpu")
        )
        shadow.meta, shadow.notes, shadow.key, shadow.is_whole = meta, notes, key, is_whole
        return shadow

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        shadows = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Shadow)]
        first, schema = shadows[0], func._schema
        name = schema.name.rpartition("::")[2]
        if name in ("_local_scalar_dense", "is_nonzero", "item"):
            return first.notes.answer(first.dtype)
        source = None  # whose memory the result has
        for number, argument in enumerate(schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            for shadow in pytree.tree_leaves(value):
                if not isinstance(shadow, Shadow):
                    continue
                if argument.alias_info is None:
                    shadow.notes.read.add(shadow.key)
                elif argument.alias_info.is_write:
                    shadow.notes.write(shadow, overwriting=name in _OVERWRITING)
                    written = shadow
                else:
                    source = shadow
        if "device" in kwargs:
            kwargs["device"] = "meta"
        found = func(*pytree.tree_map(_to_meta, args), **pytree.tree_map(_to_meta, kwargs))
        if schema.is_mutable:
            return written
        key, notes = (None, first.notes) if source is None else (source.key, source.notes)

        def shadow_of(result: Any) -> Any:
            if not isinstance(result, torch.Tensor):
                return result
            whole = source is None or (source.is_whole and result.numel() == source.numel())
            return Shadow(result, notes, key, is_whole=whole)

        return pytree.tree_map(shadow_of, found)


class Dispatch(TorchDispatchMode):
    """Inside, operations on shadows come here. Those on a tensor of another class go to the class,
    but before that PyTorch imports its DTensors, with sympy: 40 MiB of RAM."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the compiler is imported, to leave this out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, Shadow) for kind in types):
            return Shadow.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _to_meta(value: Any) -> Any:
    if isinstance(value, Shadow):
        return value.meta
    return value.to("meta") if isinstance(value, torch.Tensor) else value
