"""A module without torch: its class, its own parameters and its children; and its groups.

`discover` finds the groups of a real model with the same rules: a tree made from modules, from a
description of an architecture or from the names in a file is cut in the same places.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from offload.tiers.errors import ConfigError
from offload.zero.layout import ParamShape
from offload.zero.model_shape import GroupShape, ModelShape, UnitShape

# A subtree this small is one unit: a hook per layer would cost more than moving it whole.
SMALL_UNIT_NUMEL = 1 << 16


class ModuleKind(enum.Enum):
    """The properties of a module's class that decide where blocks are."""

    PLAIN = enum.auto()
    SEQUENCE = enum.auto()  # holds modules and runs them: nn.Sequential
    CONTAINER = enum.auto()  # holds modules, has no forward: nn.ModuleList, nn.ModuleDict
    PARAMETERS = enum.auto()  # holds parameters, has no forward: nn.ParameterList


@dataclass(eq=False, slots=True)
class TreeParam:
    """A parameter; one object in several places is a tied weight."""

    shape: tuple[int, ...]
    trainable: bool = True
    managed: bool = True  # ours to move: real floating point

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(eq=False, slots=True)
class ModuleTree:
    """A module: one object in several places is one module."""

    class_name: str
    params: dict[str, TreeParam] = field(default_factory=dict)
    children: dict[str, ModuleTree] = field(default_factory=dict)
    kind: ModuleKind = ModuleKind.PLAIN
    # what makes two modules blocks of one kind: the class itself where there is one
    type_key: object = None

    @property
    def same_type(self) -> object:
        return self.class_name if self.type_key is None else self.type_key

    def modules(self) -> Iterator[ModuleTree]:
        """This module and all below, each once, parents first."""
        seen: set[int] = set()
        waiting = [self]
        while waiting:
            module = waiting.pop()
            if id(module) not in seen:
                seen.add(id(module))
                yield module
                waiting.extend(reversed(module.children.values()))

    def parameters(self) -> Iterator[TreeParam]:
        """All parameters, each once, in module order."""
        seen: set[int] = set()
        for module in self.modules():
            for param in module.params.values():
                if id(param) not in seen:
                    seen.add(id(param))
                    yield param

    def distinct_children(self) -> list[tuple[str, ModuleTree]]:
        """Children by name; a module that is there twice, once."""
        return list({id(c): (n, c) for n, c in reversed(self.children.items())}.values())[::-1]


@dataclass(slots=True)
class TreeGroup:
    """Parameters that move together, in module order, with all names each has."""

    name: str
    params: list[tuple[tuple[str, ...], TreeParam]]


@dataclass(slots=True)
class TreeUnit:
    """A module with a forward, and the groups (by index) that it needs while it runs."""

    name: str
    module: ModuleTree
    groups: list[int] = field(default_factory=list)
    repeated: bool = False


def find_groups(
    root: ModuleTree, block_classes: Sequence[str] = ()
) -> tuple[list[TreeGroup], list[TreeUnit]]:
    """The groups and units of a tree. ConfigError if a named block class is not in it."""
    check_classes(block_classes, root)
    names = names_of(root)
    home: dict[int, int] = {}  # id(parameter) -> its group
    groups: list[TreeGroup] = []
    kept: list[TreeUnit] = []
    seen: set[int] = set()
    for unit, params in _units(root, "", set(block_classes)):
        if id(unit.module) in seen:  # one module in two places
            continue
        seen.add(id(unit.module))
        fresh = [param for param in params if id(param) not in home]
        if fresh:
            home.update((id(param), len(groups)) for param in fresh)
            groups.append(TreeGroup(unit.name, [(names[id(p)], p) for p in fresh]))
        unit.groups = sorted({home[id(param)] for param in params})
        kept.append(unit)
    return groups, kept


def shape_of(root: ModuleTree, block_classes: Sequence[str] = ()) -> ModelShape:
    """The groups and units of a tree as planning wants them."""
    groups, units = find_groups(root, block_classes)
    return ModelShape(
        tuple(
            GroupShape(
                group.name,
                tuple(ParamShape(names, p.shape, p.trainable) for names, p in group.params),
            )
            for group in groups
        ),
        tuple(UnitShape(u.name, tuple(u.groups), u.repeated) for u in units),
    )


def names_of(root: ModuleTree) -> dict[int, tuple[str, ...]]:
    """Every qualified name of each parameter, by its id, in module order."""
    names: dict[int, list[str]] = defaultdict(list)
    waiting = [("", root)]
    while waiting:
        prefix, module = waiting.pop()
        for name, param in module.params.items():
            names[id(param)].append(prefix + name)
        waiting.extend(
            (f"{prefix}{name}.", child) for name, child in reversed(module.children.items())
        )
    return {key: tuple(value) for key, value in names.items()}


def check_classes(block_classes: Sequence[str], root: ModuleTree) -> None:
    """Every named class must be one of the model's; the error lists those that could be meant."""
    if not block_classes:
        return
    found = {m.class_name for m in root.modules() if next(m.parameters(), None) is not None}
    for name in block_classes:
        if name not in found:
            raise ConfigError(
                f"groups.blocks: the model has no module of class {name} with parameters; "
                f"it has {', '.join(sorted(found))}"
            )


def _units(
    module: ModuleTree, name: str, classes: set[str]
) -> Iterator[tuple[TreeUnit, list[TreeParam]]]:
    """Depth first: a block or small subtree is one unit, else own parameters, then children."""
    if _is_whole(module, name, classes):
        params = _managed(module.parameters())
        if params:
            yield TreeUnit(name, module, repeated=module.class_name in classes), params
        return
    own = _managed(iter(module.params.values()))
    if own:
        yield TreeUnit(name, module), own
    repeated = set() if classes else _repeated_children(module)
    for child_name, child in module.distinct_children():
        path = f"{name}.{child_name}" if name else child_name
        if id(child) in repeated:
            yield TreeUnit(path, child, repeated=True), _managed(child.parameters())
        else:
            yield from _units(child, path, classes)


def _is_whole(module: ModuleTree, name: str, classes: set[str]) -> bool:
    if module.class_name in classes:
        return True
    if module.kind in (ModuleKind.CONTAINER, ModuleKind.PARAMETERS):
        return False  # has no forward that could be hooked
    if not module.children:
        return True
    if classes and any(inner.class_name in classes for inner in module.modules()):
        return False
    numel = sum(param.numel for param in module.parameters())
    return bool(name) and numel <= SMALL_UNIT_NUMEL


def _repeated_children(module: ModuleTree) -> set[int]:
    """Children of a container that share their class with a sibling and hold parameters."""
    if module.kind not in (ModuleKind.CONTAINER, ModuleKind.SEQUENCE):
        return set()
    children = [c for _, c in module.distinct_children() if _managed(c.parameters())]
    counts = Counter(child.same_type for child in children)
    hookable = [child for child in children if child.kind is not ModuleKind.CONTAINER]
    return {id(child) for child in hookable if counts[child.same_type] > 1}


def _managed(params: Iterator[TreeParam]) -> list[TreeParam]:
    """In order, each once, those that are ours to move."""
    unique = {id(param): param for param in params if param.managed}
    return list(unique.values())
