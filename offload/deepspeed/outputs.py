"""The tensors in what a model returns, or is given, wherever they are in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_OPAQUE = (type, FunctionType, MethodType, ModuleType, nn.Module)


def with_tensors(values: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `values` with `change(tensor)` for each tensor in it: in what torch knows as a tree
    (tuples, lists, dicts, transformers' outputs), in subclasses of these, and in the attributes of
    other objects, such as dataclasses. An object in which a tensor changed is copied."""
    made: dict[int, Any] = {}

    def of(value: Any) -> Any:
        return pytree.tree_map(of_leaf, value)

    def of_leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        if id(value) not in made:
            made[id(value)] = value  # what refers to itself ends here
            made[id(value)] = of_object(value)
        return made[id(value)]

    def of_object(value: Any) -> Any:
        if isinstance(value, _OPAQUE):
            return value
        attributes, items = _changed(_attributes(value), of), _changed(_items(value), of)
        if not attributes and not items:
            return value
        found = copy.copy(value)
        if isinstance(value, tuple):
            found = tuple.__new__(type(value), [items.get(i, x) for i, x in enumerate(value)])
            attributes = _attributes(value) | attributes
        else:
            for key, new in items.items():
                found[key] = new
        for name, new in attributes.items():
            object.__setattr__(found, name, new)
        return found

    return of(values)


def _changed(parts: dict[Any, Any], of: Callable[[Any], Any]) -> dict[Any, Any]:
    """Of the parts that have changed leaves, what they are now."""
    pairs = [(key, part, of(part)) for key, part in parts.items()]
    return {
        key: new for key, part, new in pairs
        if any(a is not b for a, b in zip(*map(pytree.tree_leaves, (part, new)), strict=True))
    }  # fmt: skip


def _items(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, (list, tuple)) else {}


def _attributes(value: Any) -> dict[str, Any]:
    """Those in an object's dictionary and in its slots."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}
