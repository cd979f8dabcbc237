"""Which parameters are gathered together: repeated blocks, and the rest by the module with them.

A *unit* is a module whose forward needs groups; a *group* is a set of parameters that move
together. Usually there is one group per unit. Tied weights belong to the first unit that has them;
every other unit with that weight needs the first one's group as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from offload.tiers.errors import ConfigError
from offload.zero.layout import ParamShape
from offload.zero.model_shape import GroupShape, ModelShape, UnitShape

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# A subtree this small is one unit: a hook per layer would cost more than moving it whole.
SMALL_UNIT_NUMEL = 1 << 16


@dataclass(slots=True)
class GroupPlan:
    """Parameters of one group, in module order: qualified names (tied: several) and objects."""

    name: str
    params: list[tuple[tuple[str, ...], nn.Parameter]]


@dataclass(slots=True)
class Unit:
    """A module with a forward, and the groups (by index) that it needs while it runs."""

    name: str
    module: nn.Module
    groups: list[int] = field(default_factory=list)
    repeated: bool = False  # one of the model's blocks


@dataclass(slots=True)
class Discovery:
    groups: list[GroupPlan]
    units: list[Unit]

    def shape(self) -> ModelShape:
        """The same without modules and values."""
        return ModelShape(
            tuple(GroupShape(group.name, shapes_of(group.params)) for group in self.groups),
            tuple(UnitShape(u.name, tuple(u.groups), u.repeated) for u in self.units),
        )


def shapes_of(
    params: Iterable[tuple[tuple[str, ...], nn.Parameter]],
) -> tuple[ParamShape, ...]:
    """`(names, parameter)` pairs without their values."""
    return tuple(ParamShape(names, tuple(p.shape), p.requires_grad) for names, p in params)


def managed(param: nn.Parameter) -> bool:
    """Whether a parameter is ours to move: real floating point (integers and complex stay)."""
    return param.is_floating_point() and not param.is_sparse


def discover(model: nn.Module, block_classes: Sequence[str] = ()) -> Discovery:
    """The groups and units of a model. ConfigError if a named block class is not in it."""
    names = _names_of(model)
    units = list(_units(model, "", set(block_classes)))
    _check_classes(block_classes, model)
    home: dict[int, int] = {}  # id(parameter) -> its group
    groups: list[GroupPlan] = []
    kept: list[Unit] = []
    seen: set[int] = set()
    for unit, params in units:
        if id(unit.module) in seen:  # one module in two places
            continue
        seen.add(id(unit.module))
        fresh = [param for param in params if id(param) not in home]
        if fresh:
            for param in fresh:
                home[id(param)] = len(groups)
            groups.append(GroupPlan(unit.name, [(names[id(p)], p) for p in fresh]))
        unit.groups = sorted({home[id(param)] for param in params})
        kept.append(unit)
    return Discovery(groups, kept)


def _names_of(model: nn.Module) -> dict[int, tuple[str, ...]]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[id(param)].append(name)
    return {key: tuple(value) for key, value in names.items()}


def _units(
    module: nn.Module, name: str, classes: set[str]
) -> Iterator[tuple[Unit, list[nn.Parameter]]]:
    """Depth first: a block or small subtree is one unit, else own parameters, then children."""
    if _is_whole(module, name, classes):
        params = _params(module.parameters())
        if params:
            yield Unit(name, module, repeated=type(module).__name__ in classes), params
        return
    own = _params(module.parameters(recurse=False))
    if own:
        yield Unit(name, module), own
    repeated = set() if classes else _repeated_children(module)
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if id(child) in repeated:
            params = _params(child.parameters())
            yield Unit(path, child, repeated=True), params
        else:
            yield from _units(child, path, classes)


def _is_whole(module: nn.Module, name: str, classes: set[str]) -> bool:
    if type(module).__name__ in classes:
        return True
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
        return False  # has no forward that could be hooked
    if not any(True for _ in module.children()):
        return True
    if any(type(child).__name__ in classes for child in module.modules()):
        return False
    numel = sum(param.numel() for param in module.parameters())
    return bool(name) and numel <= SMALL_UNIT_NUMEL


def _repeated_children(module: nn.Module) -> set[int]:
    """Children of a container that share their class with a sibling and hold parameters."""
    if not isinstance(module, _CONTAINERS):
        return set()
    children = [child for child in module.children() if _params(child.parameters())]
    counts = Counter(type(child) for child in children)
    hookable = [c for c in children if not isinstance(c, (nn.ModuleList, nn.ModuleDict))]
    return {id(child) for child in hookable if counts[type(child)] > 1}


def _params(params: Iterator[nn.Parameter]) -> list[nn.Parameter]:
    return [param for param in params if managed(param)]


def _check_classes(classes: Sequence[str], model: nn.Module) -> None:
    """Every named class must be one of the model's; the error lists those that could be meant."""
    found = {
        type(module).__name__
        for module in model.modules()
        if next(module.parameters(), None) is not None
    }
    for name in classes:
        if name not in found:
            raise ConfigError(
                f"groups.blocks: the model has no module of class {name} with parameters; "
                f"it has {', '.join(sorted(found))}"
            )
