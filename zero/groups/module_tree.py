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

from offload.tiers.errors import ConfigError, UnsupportedError
from offload.zero.groups.layout import ParamShape
from offload.zero.groups.model_shape import GroupShape, ModelShape, UnitShape

# A subtree this small is one unit: a hook per layer would cost more than moving it whole.
SMALL_UNIT_NUMEL = 1 << 16
# Experts that are this small together are not moved one by one, for the same reason.
SMALL_TABLE_NUMEL = 1 << 16


class ModuleKind(enum.Enum):
    """The properties of a module's class that decide where blocks are."""

    PLAIN = enum.auto()
    SEQUENCE = enum.auto()  # holds modules and runs them: nn.Sequential
    CONTAINER = enum.auto()  # holds modules, has no forward: nn.ModuleList, nn.ModuleDict
    PARAMETERS = enum.auto()  # holds parameters, has no forward: nn.ParameterList
    PACKED_EXPERTS = enum.auto()  # its parameters have one row per expert


@dataclass(eq=False, slots=True)
class TreeParam:
    """A parameter; one object in several places is a tied weight."""

    shape: tuple[int, ...]
    trainable: bool = True
    managed: bool = True  # ours to move: real floating point
    packed: TreeParam | None = None  # it is a row of this one
    row: int = 0

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
    ep_size: int = 1  # its children are experts, others of which are on other ranks
    # what makes two modules blocks of one kind: the class itself where there is one
    type_key: object = None

    @property
    def same_type(self) -> object:
        return self.class_name if self.type_key is None else self.type_key

    def modules(self) -> Iterator[ModuleTree]:
        """Yield this module and all below, each once, parents first."""
        seen: set[int] = set()
        waiting = [self]
        while waiting:
            module = waiting.pop()
            if id(module) not in seen:
                seen.add(id(module))
                yield module
                waiting.extend(reversed(module.children.values()))

    def parameters(self) -> Iterator[TreeParam]:
        """Yield all parameters, each once, in module order."""
        seen: set[int] = set()
        for module in self.modules():
            for param in module.params.values():
                if id(param) not in seen:
                    seen.add(id(param))
                    yield param

    def distinct_children(self) -> list[tuple[str, ModuleTree]]:
        """Return children by name; a module that is there twice, once."""
        return list({id(c): (n, c) for n, c in reversed(self.children.items())}.values())[::-1]


@dataclass(slots=True)
class TreeGroup:
    """Parameters that move together, in module order, with all names each has."""

    name: str
    params: list[tuple[tuple[str, ...], TreeParam]]
    table: str = ""  # the module of experts that it is one of
    ep_size: int = 1  # over how many ranks those are spread


@dataclass(slots=True)
class TreeUnit:
    """A module with a forward, and the groups (by index) that it needs while it runs."""

    name: str
    module: ModuleTree
    groups: list[int] = field(default_factory=list)
    repeated: bool = False
    table: str = ""  # the module of experts that it is one of
    expert: int | None = None  # of packed experts: which rows of `module`'s parameters it has


def find_groups(
    root: ModuleTree, block_classes: Sequence[str] = (), *, experts: bool = True
) -> tuple[list[TreeGroup], list[TreeUnit]]:
    """Return the groups and units of a tree; where `experts`, each expert is one of its own, and
    where experts are spread over ranks in any case.

    Raises ConfigError if a named block class is not in it; UnsupportedError if experts that are
    spread have a parameter that something else has, too.
    """
    check_classes(block_classes, root)
    names = names_of(root)
    tables = _Tables(root, names, all_of_them=experts)
    home: dict[int, int] = {}  # id(parameter) -> its group
    groups: list[TreeGroup] = []
    kept: list[TreeUnit] = []
    seen: set[int] = set()
    for unit, params in _units(root, "", set(block_classes), tables):
        if unit.expert is None:
            if id(unit.module) in seen:  # one module in two places
                continue
            seen.add(id(unit.module))
        fresh = [param for param in params if id(param) not in home]
        if fresh:
            home.update((id(param), len(groups)) for param in fresh)
            named = [(_names_in(names, param), param) for param in fresh]
            groups.append(TreeGroup(unit.name, named, unit.table, tables.ep_size(unit)))
        unit.groups = sorted({home[id(param)] for param in params})
        kept.append(unit)
    return groups, kept


def shape_of(
    root: ModuleTree, block_classes: Sequence[str] = (), *, experts: bool = True
) -> ModelShape:
    """Return the groups and units of a tree as planning wants them."""
    return shape_of_groups(*find_groups(root, block_classes, experts=experts))


def shape_of_groups(groups: Sequence[TreeGroup], units: Sequence[TreeUnit]) -> ModelShape:
    """Return the groups and units that `find_groups` found as planning wants them."""
    return ModelShape(
        tuple(
            GroupShape(
                group.name,
                tuple(ParamShape(names, p.shape, p.trainable) for names, p in group.params),
                table=group.table, packed=any(p.packed is not None for _, p in group.params),
                ep_size=group.ep_size,
            )
            for group in groups
        ),
        tuple(UnitShape(u.name, tuple(u.groups), u.repeated, u.table) for u in units),
    )  # fmt: skip


def _names_in(names: dict[int, tuple[str, ...]], param: TreeParam) -> tuple[str, ...]:
    """Return a parameter's names; for a row, those of its packed parameter with its number."""
    if param.packed is None:
        return names[id(param)]
    return tuple(f"{name}[{param.row}]" for name in names[id(param.packed)])


def names_of(root: ModuleTree) -> dict[int, tuple[str, ...]]:
    """Return every qualified name of each parameter, by its id, in module order."""
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
    """Raise ConfigError for a class that is not the model's, listing those that may be meant."""
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
    module: ModuleTree, name: str, classes: set[str], tables: _Tables
) -> Iterator[tuple[TreeUnit, list[TreeParam]]]:
    """Yield units depth first: a block or small subtree is one unit, else own parameters, then
    children. Experts are units behind the one around them."""
    if tables.has(module):
        yield from tables.experts_of(module, name)
        return
    if _is_whole(module, name, classes):
        yield from _whole(module, name, tables, repeated=module.class_name in classes)
        return
    own = _managed(iter(module.params.values()))
    if own:
        yield TreeUnit(name, module), own
    repeated = set() if classes else _repeated_children(module)
    for child_name, child in module.distinct_children():
        path = f"{name}.{child_name}" if name else child_name
        if id(child) in repeated:
            # experts are no blocks: what each is called with are tokens, not the batch
            is_block = not _names_experts(name.rpartition(".")[2])
            yield from _whole(child, path, tables, repeated=is_block)
        else:
            yield from _units(child, path, classes, tables)


def _whole(
    module: ModuleTree, name: str, tables: _Tables, *, repeated: bool
) -> Iterator[tuple[TreeUnit, list[TreeParam]]]:
    """Yield a module as one unit, but for the experts in it."""
    within = list(tables.within(module, name))
    apart = {id(param) for _, table in within for param in table.parameters()}
    params = [param for param in _managed(module.parameters()) if id(param) not in apart]
    if params or (within and repeated):
        yield TreeUnit(name, module, repeated=repeated), params
    for path, table in within:
        yield from tables.experts_of(table, path)


class _Tables:
    """The modules of experts in a tree whose experts move one by one."""

    def __init__(
        self, root: ModuleTree, names: dict[int, tuple[str, ...]], *, all_of_them: bool
    ) -> None:
        self._found: set[int] = set()
        self._ep_sizes: dict[str, int] = {}  # by name, of those that are spread over ranks
        for module in root.modules():
            for name, child in module.children.items():
                if child.ep_size > 1:
                    _check_spread(child, names)
                    self._found.add(id(child))
                elif all_of_them and (
                    _is_packed(child, names) or (_names_experts(name) and _is_list(child, names))
                ):
                    self._found.add(id(child))

    def ep_size(self, unit: TreeUnit) -> int:
        """Return the number of ranks over which the experts are spread that a unit is one of."""
        return self._ep_sizes.get(unit.table, 1)

    def has(self, module: ModuleTree) -> bool:
        return id(module) in self._found

    def within(self, module: ModuleTree, name: str) -> Iterator[tuple[str, ModuleTree]]:
        """Yield the modules of experts below a module, with their names."""
        for child_name, child in module.distinct_children():
            path = f"{name}.{child_name}" if name else child_name
            if self.has(child):
                yield path, child
            else:
                yield from self.within(child, path)

    def experts_of(
        self, table: ModuleTree, name: str
    ) -> Iterator[tuple[TreeUnit, list[TreeParam]]]:
        """Yield each expert as a unit, with its parameters."""
        self._ep_sizes[name] = table.ep_size
        if table.kind is not ModuleKind.PACKED_EXPERTS:
            for child_name, expert in _listed(table):
                unit = TreeUnit(f"{name}.{child_name}", expert, table=name)
                yield unit, _managed(expert.parameters())
            return
        for row in range(next(table.parameters()).shape[0]):
            rows = [
                TreeParam(param.shape[1:], param.trainable, True, param, row)
                for param in table.parameters()
            ]
            yield TreeUnit(f"{name}.{row}", table, table=name, expert=row), rows


def _check_spread(module: ModuleTree, names: dict[int, tuple[str, ...]]) -> None:
    for param in module.parameters():
        if not param.managed or len(names[id(param)]) > 1:
            what = "is no real floating-point tensor" if not param.managed else "is tied"
            raise UnsupportedError(
                f"{' = '.join(names[id(param)])} {what}, and belongs to experts that are spread "
                f"over {module.ep_size} ranks; give each expert parameters of its own, or set "
                "ep_size=1"
            )


def _names_experts(name: str) -> bool:
    return name == "experts" or name.endswith("_experts")


def _is_packed(module: ModuleTree, names: dict[int, tuple[str, ...]]) -> bool:
    if module.kind is not ModuleKind.PACKED_EXPERTS:
        return False
    params = list(module.parameters())
    is_even = len({param.shape[:1] for param in params}) == 1 and params[0].shape[0] > 1
    return is_even and _is_apart(params, names)


def _listed(table: ModuleTree) -> list[tuple[str, ModuleTree]]:
    """Return the experts in a list, which may hold a dropout or an identity beside them."""
    return [(n, c) for n, c in table.distinct_children() if next(c.parameters(), None) is not None]


def _is_list(module: ModuleTree, names: dict[int, tuple[str, ...]]) -> bool:
    experts = [expert for _, expert in _listed(module)]
    hookable = all(
        expert.kind not in (ModuleKind.CONTAINER, ModuleKind.PARAMETERS) for expert in experts
    )
    alike = len({expert.same_type for expert in experts}) == 1
    is_list = module.kind is ModuleKind.CONTAINER and len(experts) > 1 and not module.params
    return is_list and hookable and alike and _is_apart(list(module.parameters()), names)


def _is_apart(params: Sequence[TreeParam], names: dict[int, tuple[str, ...]]) -> bool:
    """Return whether experts' parameters are worth moving one by one, and in no other place."""
    managed = all(param.managed and len(names[id(param)]) == 1 for param in params)
    return managed and sum(param.numel for param in params) > SMALL_TABLE_NUMEL


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
    """Return children of a container that share their class with a sibling and hold parameters."""
    if module.kind not in (ModuleKind.CONTAINER, ModuleKind.SEQUENCE):
        return set()
    children = [c for _, c in module.distinct_children() if _managed(c.parameters())]
    counts = Counter(child.same_type for child in children)
    hookable = [child for child in children if child.kind is not ModuleKind.CONTAINER]
    return {id(child) for child in hookable if counts[child.same_type] > 1}


def _managed(params: Iterator[TreeParam]) -> list[TreeParam]:
    """Return the parameters that the engine moves, in order, each once."""
    unique = {id(param): param for param in params if param.managed}
    return list(unique.values())
