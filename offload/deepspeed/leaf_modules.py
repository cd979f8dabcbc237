"""DeepSpeed's leaf modules: those whose parameters stage 3 gathers as one.

Ranks that choose different branches of a module would gather different groups. A leaf is a block,
and its group is gathered by every rank that enters it. Most leaves are parts of a block anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from offload.tiers.errors import UnsupportedError
from offload.zero.groups.discovery import discover

_LEAVES: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # are never called themselves


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module is a leaf."""
    return model in _LEAVES


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the leaves in `model`."""
    return [module for module in model.modules() if module in _LEAVES]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark this module as a leaf, or as none; this takes effect in `initialize`."""
    (_LEAVES.add if flag else _LEAVES.discard)(model)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes (or class names, also with their modules') as leaves.
    Return them; raise ValueError if there is none."""
    types = tuple(each for each in leaf_module_classes if isinstance(each, type))
    names = {*leaf_module_classes}
    found = [m for m in model.modules() if isinstance(m, types) or _names_of(m) & names]
    if raise_if_not_found and not found:
        raise ValueError(f"{type(model).__name__} has no module of {list(leaf_module_classes)}")
    for module in found:
        set_z3_leaf_module(module, True)
    return found


def _names_of(module: nn.Module) -> set[type | str]:
    kind = type(module)
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}


def follow_section(model: nn.Module, section: Mapping[str, Any]) -> None:
    """Mark the modules that `zero_optimization.leaf_module` of a configuration names as leaves.
    Raise UnsupportedError if it names others than by their classes."""
    for key in ("names", "name_suffixes"):
        if section.get(key):
            raise UnsupportedError(
                f"zero_optimization.leaf_module.{key} is not supported; write the modules' classes "
                "under zero_optimization.leaf_module.classes"
            )
    classes = section.get("classes", [])
    classes = [classes] if isinstance(classes, str) else classes
    set_z3_leaf_modules(model, classes, raise_if_not_found=False)


def classes_of_leaves(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Return classes that must be blocks beside `blocks`, so that each leaf is in one group."""
    modules, found = dict(model.named_modules()), discover(model, blocks, experts=False)
    group_of = {
        id(param): index for index, group in enumerate(found.groups) for _, param in group.params
    }
    whole: list[nn.Module] = []
    for name, module in modules.items():
        if module in _LEAVES and len({group_of.get(id(p)) for p in module.parameters()}) > 1:
            runs = name
            while runs and isinstance(modules[runs], _CONTAINERS):
                runs = runs.rpartition(".")[0]
            whole.append(modules[runs])
    if not whole:
        return []
    inside = {id(inner) for module in whole for inner in module.modules()}
    # once classes are named, blocks are not found automatically any more
    others = [u.module for u in found.units if u.repeated and id(u.module) not in inside]
    return sorted({type(module).__name__ for module in (*whole, *others)} - {*blocks})
