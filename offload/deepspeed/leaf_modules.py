"""DeepSpeed's leaf modules: those whose parameters stage 3 gathers as one.

Ranks that choose different branches of a module would gather different groups. A leaf is a block,
and its group is gathered by every rank that enters it. Most leaves are parts of a block anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

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
    return _set_classes(model, leaf_module_classes, raise_if_not_found, flag=True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules`."""
    return _set_classes(model, leaf_module_classes, raise_if_not_found, flag=False)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:  # fmt: skip
    """Mark the modules of these names as leaves, or as none. Return them and the names that the
    model does not have; raise ValueError if there are such names."""
    return _set_names(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:  # fmt: skip
    """Mark the modules whose names end so as leaves, as `set_z3_leaf_modules_by_name` does."""
    return _set_names(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def _set_classes(
    model: nn.Module, classes: Sequence[type | str], strict: bool, *, flag: bool
) -> list[nn.Module]:
    types = tuple(each for each in classes if isinstance(each, type))
    found = [m for m in model.modules() if isinstance(m, types) or _names_of(m) & {*classes}]
    if strict and not found:
        raise ValueError(f"{type(model).__name__} has no module of {list(classes)}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _names_of(module: nn.Module) -> set[type | str]:
    kind = type(module)
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}


def _set_names(
    model: nn.Module, names: Sequence[str], matches: Callable[[str, str], bool], flag: bool,
    strict: bool,
) -> tuple[list[nn.Module], list[str]]:  # fmt: skip
    modules = dict(model.named_modules())
    missing = [name for name in names if not any(matches(there, name) for there in modules)]
    if strict and missing:
        raise ValueError(f"{type(model).__name__} has no modules named {missing}")
    found = [
        module for there, module in modules.items() if any(matches(there, name) for name in names)
    ]
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing


def follow_section(model: nn.Module, section: Mapping[str, Any]) -> None:
    """Mark the modules that `zero_optimization.leaf_module` of a configuration names as leaves."""
    classes, names, suffixes = (
        [given] if isinstance(given := section.get(key, []), str) else given
        for key in ("classes", "names", "name_suffixes")
    )
    set_z3_leaf_modules(model, classes, raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, names, raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, suffixes, raise_if_not_found=False)


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
