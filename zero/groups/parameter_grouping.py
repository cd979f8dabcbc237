"""The groups of parameters that are gathered together: repeated blocks, and the rest by module.

A *unit* is a module whose forward needs groups; a *group* is a set of parameters that move
together. Usually there is one group per unit. Tied weights belong to the first unit that has them;
every other unit with that weight needs the first one's group as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from offload.tiers.cached_layer import CachedLayer
from offload.tiers.errors import ConfigError, UnsupportedError
from offload.zero.experts.packed import PackedParam
from offload.zero.groups.layout import ParamShape
from offload.zero.groups.model_shape import (
    SMALL_TABLE_NUMEL,
    SMALL_UNIT_NUMEL,
    GroupShape,
    ModelShape,
    UnitShape,
)
from offload.zero.groups.storage import Storage, names_experts
from offload.zero.tensors.local_tensors import is_dtensor, local_of

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
WITHOUT_FORWARD = (*_CONTAINERS, nn.ParameterList, nn.ParameterDict)  # it could not be hooked

# How many experts a token is sent to: keys of transformers' (5.17) configurations.
_CHOSEN = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k",
    "moe_k", "top_k_experts",
)  # fmt: skip
_ATTRIBUTES = ("num_experts_per_tok", "top_k", "k")  # of routers, or of modules with experts


@dataclass(slots=True)
class Unit:
    """A module with a forward, and the groups (by index) that it needs while it runs."""

    name: str
    module: nn.Module
    groups: list[int] = field(default_factory=list)
    repeated: bool = False  # one of the model's blocks
    table: str = ""  # the module of experts that it is one of
    is_packed: bool = False  # `module` is the table, which computes all of its experts


@dataclass(slots=True)
class ParameterGrouping:
    """A model's groups, and their parameters, each by all of its names. In the shape of a group
    DTensors are the parts that this rank has, and packed parameters their rows."""

    groups: list[GroupShape]
    params: dict[tuple[str, ...], nn.Parameter]
    units: list[Unit]
    packed: list[PackedParam]
    experts_per_token: int | None = None  # chosen by a router; None: unknown
    cached: tuple[CachedLayer, ...] = ()  # layers whose keys and values are kept in tiers

    def shape(self) -> ModelShape:
        units = (UnitShape(u.name, tuple(u.groups), u.repeated, u.table) for u in self.units)
        groups, chosen = tuple(self.groups), self.experts_per_token
        return ModelShape(groups, tuple(units), chosen, self.cached)

    def stored(self, storage: Storage | None, matrices: Collection[str] = ()) -> ParameterGrouping:
        """Return the same with frozen weights as `storage` has them, apart from those that are
        trained, and the `matrices` that Muon trains in groups of their own.

        Raises ConfigError and UnsupportedError as `ModelShape.stored` and `with_matrices`;
        UnsupportedError for DTensors.
        """
        for names, param in self.params.items() if storage or matrices else ():
            if is_dtensor(param) and (storage or names[0] in matrices):
                raise UnsupportedError(
                    f"{'storage.weights' if storage else 'use_muon'}: {names[0]} is a DTensor, of "
                    "which each rank has a part; remove that, or do not parallelise the model"
                )
        shape = self.shape().with_matrices(matrices).stored(storage)
        units = [
            replace(unit, groups=list(its.groups))
            for unit, its in zip(self.units, shape.units, strict=True)
        ]
        return replace(self, groups=list(shape.groups), units=units)


def managed(param: nn.Parameter, only: torch.dtype | None = None) -> bool:
    """Return whether the engine moves a parameter: real floating point only (integers and complex
    numbers stay in the model), in the format `only` if there is one."""
    moves = param.is_floating_point() and not param.is_sparse
    return moves and (only is None or param.dtype is only)


def refuse_uninitialised(model: nn.Module) -> None:
    """Raise UnsupportedError if a lazy module of torch has not been called yet."""
    for name, param in model.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise UnsupportedError(
                f"{name} has no shape yet, as its lazy module was never called; call the model "
                "once with an example of its inputs before it is given to offload"
            )


def group_parameters(
    model: nn.Module, block_classes: Sequence[str] = (), *, experts: bool = True,
    frozen: bool = False, only: torch.dtype | None = None,
) -> ParameterGrouping:  # fmt: skip
    """Return the groups and units of a model. `experts`: each expert is one of its own; where
    experts are spread over ranks in any case. `frozen`: nothing will be updated. `only`:
    parameters in other formats stay in the model.

    Raises ConfigError if a named block class is not in it; UnsupportedError if experts that are
    spread have a parameter that something else has, too.
    """
    refuse_uninitialised(model)
    _check_classes(block_classes, model)
    rules = _Rules(model, block_classes, only, experts=experts)
    home: dict[int, int] = {}  # id(parameter) -> its group
    groups: list[GroupShape] = []
    params_by_names: dict[tuple[str, ...], nn.Parameter] = {}
    units: list[Unit] = []
    seen: set[int] = set()
    for unit, params in rules.units(model):
        if not unit.is_packed:
            if id(unit.module) in seen:  # one module in two places
                continue
            seen.add(id(unit.module))
        fresh = [param for param in params if id(param) not in home]
        if fresh:
            home.update((id(param), len(groups)) for param in fresh)
            named = {rules.names_of(param): param for param in fresh}
            params_by_names.update(named)
            shapes = tuple(
                ParamShape(names, tuple(local_of(p).shape), p.requires_grad and not frozen)
                for names, p in named.items()
            )
            spread, packed = rules.ep_sizes.get(unit.table, 1), unit.is_packed
            groups.append(
                GroupShape(unit.name, shapes, table=unit.table, packed=packed, ep_size=spread)
            )
        unit.groups = sorted({home[id(param)] for param in params})
        units.append(unit)
    chosen = experts_per_token_of(model) if any(group.table for group in groups) else None
    return ParameterGrouping(groups, params_by_names, units, rules.packed, chosen)


def _check_classes(block_classes: Sequence[str], model: nn.Module) -> None:
    """Raise ConfigError for a class that is not the model's, listing those that may be meant."""
    if not block_classes:
        return
    with_params = (m for m in model.modules() if next(m.parameters(), None) is not None)
    classes = {type(module).__name__ for module in with_params}
    for name in block_classes:
        if name not in classes:
            raise ConfigError(
                f"groups.blocks: the model has no module of class {name} with parameters; "
                f"it has {', '.join(sorted(classes))}"
            )


Units = Iterator[tuple[Unit, list[nn.Parameter]]]


class _Rules:
    """The rules by which a model is cut into units: blocks, small subtrees, experts, and modules
    with parameters of their own."""

    def __init__(
        self, model: nn.Module, block_classes: Sequence[str], only: torch.dtype | None, *,
        experts: bool,
    ) -> None:  # fmt: skip
        self.packed: list[PackedParam] = []
        self.ep_sizes: dict[str, int] = {}  # over how many ranks the experts of a table are spread
        self._classes = set(block_classes)
        self._only = only
        self._rows: dict[int, tuple[str, ...]] = {}  # names of packed parameters' rows
        self._names: dict[int, list[str]] = defaultdict(list)
        for name, param in model.named_parameters(remove_duplicate=False):
            self._names[id(param)].append(name)
        # modules whose parameters another one changes as a whole while they compute (PEFT's
        # `target_parameters`)
        whole = {
            id(child) for module in model.modules() for child in module.children()
            if isinstance(getattr(module, "parameter_name", None), str)
        }  # fmt: skip
        self._packed_tables = {
            id(each) for each in model.modules()
            if id(each) not in whole and _is_packed(each) and self._are_even_and_apart(each)
        }  # fmt: skip
        self._tables = {
            id(child) for module in model.modules()
            for name, child in module._modules.items()
            if child is not None and self._is_table(name, child, experts)
        }  # fmt: skip

    def names_of(self, param: nn.Parameter) -> tuple[str, ...]:
        """Return a parameter's names; for a row, those of its packed parameter with its number."""
        return self._rows.get(id(param)) or tuple(self._names[id(param)])

    def units(self, module: nn.Module, name: str = "") -> Units:
        """Yield units depth first: a block or small subtree is one unit, else own parameters, then
        children. Experts are units behind the one around them."""
        if id(module) in self._tables:
            yield from self._experts_of(module, name)
            return
        if self._is_whole(module, name):
            is_block = type(module).__name__ in self._classes
            yield from self._whole(module, name, repeated=is_block)
            return
        own = self._managed(module.parameters(recurse=False))
        if own:
            yield Unit(name, module), own
        repeated = set() if self._classes else self._repeated_children(module)
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if id(child) in repeated:
                # experts are no blocks: what each is called with are tokens, not the batch
                is_block = not names_experts(name.rpartition(".")[2])
                yield from self._whole(child, path, repeated=is_block)
            else:
                yield from self.units(child, path)

    def _whole(self, module: nn.Module, name: str, *, repeated: bool) -> Units:
        """Yield a module as one unit, but for the experts in it."""
        within = list(self._tables_within(module, name))
        apart = {id(param) for _, table in within for param in table.parameters()}
        params = [p for p in self._managed(module.parameters()) if id(p) not in apart]
        if params or (within and repeated):
            yield Unit(name, module, repeated=repeated), params
        for path, table in within:
            yield from self._experts_of(table, path)

    def _managed(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [param for param in params if managed(param, self._only)]

    def _is_whole(self, module: nn.Module, name: str) -> bool:
        if type(module).__name__ in self._classes:
            return True
        if isinstance(module, WITHOUT_FORWARD):
            return False
        if not module._modules:
            return True
        if self._classes and any(type(m).__name__ in self._classes for m in module.modules()):
            return False
        return bool(name) and _numel(module.parameters()) <= SMALL_UNIT_NUMEL

    def _repeated_children(self, module: nn.Module) -> set[int]:
        """Return a container's children with parameters that share their class with a sibling."""
        if not isinstance(module, (*_CONTAINERS, nn.Sequential)):
            return set()
        children = [child for child in module.children() if self._managed(child.parameters())]
        counts = Counter(map(type, children))
        hookable = [child for child in children if not isinstance(child, _CONTAINERS)]
        return {id(child) for child in hookable if counts[type(child)] > 1}

    def _is_table(self, name: str, module: nn.Module, experts: bool) -> bool:
        """Return whether a module has experts that move one by one."""
        if ep_size_of(module) > 1:
            self._check_spread(module)
            return True
        is_list = names_experts(name) and self._is_list(module)
        return experts and (id(module) in self._packed_tables or is_list)

    def _check_spread(self, module: nn.Module) -> None:
        for param in module.parameters():
            names = self._names[id(param)]
            if not managed(param, self._only) or len(names) > 1:
                what = "is tied" if len(names) > 1 else "is no real floating-point tensor"
                raise UnsupportedError(
                    f"{' = '.join(names)} {what}, and belongs to experts that are spread over "
                    f"{ep_size_of(module)} ranks; give each expert parameters of its own, or set "
                    "ep_size=1"
                )

    def _are_even_and_apart(self, module: nn.Module) -> bool:
        params = list(module.parameters())
        is_even = len({param.shape[:1] for param in params}) == 1 and params[0].shape[0] > 1
        return is_even and self._is_apart(params)

    def _is_list(self, module: nn.Module) -> bool:
        experts = [expert for _, expert in _listed(module)]
        hookable = not any(isinstance(expert, WITHOUT_FORWARD) for expert in experts)
        alike = len(set(map(type, experts))) == 1 and len(experts) > 1
        is_list = isinstance(module, _CONTAINERS) and not module._parameters
        return is_list and hookable and alike and self._is_apart(list(module.parameters()))

    def _is_apart(self, params: Sequence[nn.Parameter]) -> bool:
        """Return whether experts' parameters are worth moving one by one, and in no other place."""
        apart = all(managed(p, self._only) and len(self._names[id(p)]) == 1 for p in params)
        return apart and _numel(params) > SMALL_TABLE_NUMEL

    def _tables_within(self, module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of experts below a module, with their names."""
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if id(child) in self._tables:
                yield path, child
            else:
                yield from self._tables_within(child, path)

    def _experts_of(self, table: nn.Module, name: str) -> Units:
        self.ep_sizes[name] = ep_size_of(table)
        if id(table) not in self._packed_tables:
            for child_name, expert in _listed(table):
                unit = Unit(f"{name}.{child_name}", expert, table=name)
                yield unit, self._managed(expert.parameters())
            return
        packed = [
            PackedParam.of(param, tuple(self._names[id(param)])) for param in table.parameters()
        ]
        self.packed += packed
        for number, rows in enumerate(zip(*(each.rows for each in packed), strict=True)):
            for each, row in zip(packed, rows, strict=True):
                self._rows[id(row)] = tuple(f"{its}[{number}]" for its in each.names)
            yield Unit(f"{name}.{number}", table, table=name, is_packed=True), list(rows)


def _listed(table: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the experts in a list, which may hold a dropout or an identity beside them."""
    return [(n, c) for n, c in table.named_children() if next(c.parameters(), None) is not None]


def _numel(params: Iterable[nn.Parameter]) -> int:
    return sum(local_of(param).numel() for param in params)


def ep_size_of(module: nn.Module) -> int:
    """Return the number of ranks over which a module's experts are spread, which a list of modules
    states itself (`moe.Experts`); 1 for any other module."""
    return int(getattr(module, "ep_size", 1)) if isinstance(module, nn.ModuleList) else 1


def _is_packed(module: nn.Module) -> bool:
    """Return whether a module has experts of transformers 5, whose implementation can be chosen,
    and is the one that computes with one expert's rows at a time."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    params = list(module.parameters())
    # transformers' default, and offload's implementation, which has the same bits
    one_by_one = chosen in ("grouped_mm", "offload") and _asks_the_registry(module)
    return (
        one_by_one
        and len(params) == len(module._parameters) > 0
        and all(param.dim() >= 2 and not is_dtensor(param) for param in params)
        and any(param.dim() == 3 for param in params)
        # a hook wants the gradient of the whole
        and not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in params)
    )  # fmt: skip


def _asks_the_registry(module: nn.Module) -> bool:
    """Return whether transformers' own decorator made this forward, and it asks the registry that
    has this implementation: not FP8's, and no subclass or patch that computes by itself."""
    forward = getattr(module.forward, "__func__", None)
    cells = getattr(forward, "__closure__", None) or ()
    return any(type(cell.cell_contents).__name__ == "ExpertsInterface" for cell in cells)


def experts_per_token_of(model: nn.Module) -> int | None:
    """Return the number of experts that a router chooses, as the model's configuration has it;
    without one, as its modules' attributes have it. None if that is unknown, or layers differ."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        text = config.get_text_config()
        return _the_number([text, getattr(text, "ffn_config", None)], _CHOSEN)
    return _the_number(model.modules(), _ATTRIBUTES)


def _the_number(owners: Iterable[Any], names: Sequence[str]) -> int | None:
    """Return the number that attributes with these names have, if it is one."""
    values = (getattr(owner, name, None) for owner in owners for name in names)
    numbers = {value for value in values if type(value) is int and value > 0}
    return numbers.pop() if len(numbers) == 1 else None
