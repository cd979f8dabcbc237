"""The groups of parameters that are gathered together: repeated blocks, and the rest by module.

A *unit* is a module whose forward needs groups; a *group* is a set of parameters that move
together. Usually there is one group per unit. Tied weights belong to the first unit that has them;
every other unit with that weight needs the first one's group as well. `module_tree` has the rules,
without torch; this module applies them to torch modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from offload.tiers.errors import UnsupportedError
from offload.zero.experts.packed import PackedParam
from offload.zero.groups.model_shape import GroupShape, ModelShape, UnitShape
from offload.zero.groups.module_tree import (
    SMALL_UNIT_NUMEL,
    ModuleKind,
    ModuleTree,
    TreeGroup,
    TreeParam,
    find_groups,
    shape_of_groups,
)
from offload.zero.groups.storage import Storage
from offload.zero.kv.sizes import CachedLayer
from offload.zero.tensors.local_tensors import is_dtensor, local_of

__all__ = [
    "SMALL_UNIT_NUMEL",
    "Discovery",
    "GroupPlan",
    "Unit",
    "discover",
    "ep_size_of",
    "experts_per_token",
    "experts_per_token_of",
    "managed",
    "refuse_uninitialised",
    "tree_of",
]

# How many experts a token is sent to: keys of transformers' (5.17) configurations.
_CHOSEN = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k",
    "moe_k", "top_k_experts",
)  # fmt: skip
_ATTRIBUTES = ("num_experts_per_tok", "top_k", "k")  # of routers, and of modules with experts
_INSIDE = ("text_config", "ffn_config")
_BY_TYPE = {"switch_transformers": 1, "nllb-moe": 2}  # written into the code


@dataclass(slots=True)
class GroupPlan:
    """Parameters of one group, in module order: qualified names (tied: several) and objects. In its
    shape DTensors are the parts that this rank has, and packed parameters their rows."""

    shape: GroupShape
    params: list[tuple[tuple[str, ...], nn.Parameter]]

    @property
    def name(self) -> str:
        return self.shape.name


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
class Discovery:
    groups: list[GroupPlan]
    units: list[Unit]
    packed: list[PackedParam]
    experts_per_token: int | None = None  # that a router chooses, where that is known
    cached: tuple[CachedLayer, ...] = ()  # layers whose keys and values are kept in tiers
    adapters: frozenset[str] = frozenset()  # parameters that PEFT has added, by their names

    def shape(self) -> ModelShape:
        """Return the same without modules and values."""
        units = (UnitShape(u.name, tuple(u.groups), u.repeated, u.table) for u in self.units)
        groups = tuple(group.shape for group in self.groups)
        return ModelShape(groups, tuple(units), self.experts_per_token, self.cached)

    def stored(self, storage: Storage | None) -> Discovery:
        """Return the same with frozen weights as `storage` has them, apart from those that are
        trained; with None, unchanged. Adapters are small, and not rounded with the weights that
        they adapt.

        Raises ConfigError and UnsupportedError as `zero.storage.cut`; UnsupportedError for
        DTensors.
        """
        if storage is None:
            return self
        for names, param in (pair for group in self.groups for pair in group.params):
            if is_dtensor(param):
                raise UnsupportedError(
                    f"storage.weights: {names[0]} is a DTensor, of which each rank has a part; "
                    "remove storage, or do not parallelise the model"
                )
        shape = self.shape().stored(replace(storage, raw=self.adapters))
        params = {names: param for group in self.groups for names, param in group.params}
        units = zip(self.units, shape.units, strict=True)
        return replace(
            self,
            groups=[
                GroupPlan(group, [(each.names, params[each.names]) for each in group.params])
                for group in shape.groups
            ],
            units=[replace(unit, groups=list(its.groups)) for unit, its in units],
        )  # fmt: skip


def _adapters_in(model: nn.Module) -> Iterator[str]:
    """Yield the names of parameters that PEFT has added."""
    for prefix, module in model.named_modules():
        added = getattr(module, "adapter_layer_names", ())
        added = (*added, "prompt_encoder") if hasattr(module, "peft_config") else added
        for name, child in module.named_children() if added else ():
            if name in added or name.startswith("lora_"):
                inner = (each for each, _ in child.named_parameters())
                yield from (f"{prefix}.{name}.{each}".removeprefix(".") for each in inner)


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


def discover(
    model: nn.Module, block_classes: Sequence[str] = (), *, experts: bool = True,
    frozen: bool = False, only: torch.dtype | None = None,
) -> Discovery:  # fmt: skip
    """Return the groups and units of a model (see `find_groups`). `frozen`: nothing will be
    updated. `only`: parameters in other formats stay in the model."""
    refuse_uninitialised(model)
    trees = _Trees(frozen=frozen, only=only)
    groups, units = find_groups(trees.of(model), block_classes, experts=experts)
    packed = _pack(groups, trees)

    def found(param: TreeParam) -> nn.Parameter:
        if param.packed is None:
            return trees.params[id(param)]
        return packed[id(param.packed)].rows[param.row]

    shape = shape_of_groups(groups, units)
    return Discovery(
        [
            GroupPlan(its, [(names, found(param)) for names, param in group.params])
            for its, group in zip(shape.groups, groups, strict=True)
        ],
        [
            Unit(
                u.name, trees.modules[id(u.module)], u.groups, u.repeated, u.table,
                u.expert is not None,
            )
            for u in units
        ],
        list(packed.values()),
        experts_per_token_of(model) if any(group.table for group in groups) else None,
        adapters=frozenset(_adapters_in(model)),
    )  # fmt: skip


def _pack(groups: Sequence[TreeGroup], trees: _Trees) -> dict[int, PackedParam]:
    """Return the packed parameters, by the id of their tree's parameter."""
    packed: dict[int, PackedParam] = {}
    for group in groups:
        for names, param in group.params:
            if param.packed is not None and id(param.packed) not in packed:
                whole = tuple(name.removesuffix("[0]") for name in names)
                packed[id(param.packed)] = PackedParam.of(trees.params[id(param.packed)], whole)
    return packed


def tree_of(model: nn.Module) -> ModuleTree:
    """Return the model's modules and parameters without their code and values."""
    refuse_uninitialised(model)
    return _Trees().of(model)


class _Trees:
    """Modules as trees, and the modules of a tree's nodes, by their id."""

    def __init__(self, *, frozen: bool = False, only: torch.dtype | None = None) -> None:
        self._frozen, self._only = frozen, only
        self.modules: dict[int, nn.Module] = {}
        self.params: dict[int, nn.Parameter] = {}
        self._trees: dict[int, ModuleTree] = {}  # id(module) -> its tree
        self._params: dict[int, TreeParam] = {}
        # modules by id whose parameters another one changes as a whole while they compute (PEFT's
        # `target_parameters`)
        self._whole: set[int] = set()

    def of(self, module: nn.Module) -> ModuleTree:
        """Return the tree of a module: one per module, however many places it is in."""
        if id(module) not in self._trees:
            own = module.named_parameters(recurse=False, remove_duplicate=False)
            if isinstance(getattr(module, "parameter_name", None), str):
                self._whole.update(map(id, module._modules.values()))
            tree = ModuleTree(
                type(module).__name__,
                {name: self._param(param) for name, param in own},
                {n: self.of(child) for n, child in module._modules.items() if child is not None},
                ModuleKind.PLAIN if id(module) in self._whole else _kind_of(module),
                ep_size_of(module),
                type(module),
            )
            self._trees[id(module)] = tree
            self.modules[id(tree)] = module
        return self._trees[id(module)]

    def _param(self, param: nn.Parameter) -> TreeParam:
        if id(param) not in self._params:
            shape = tuple(local_of(param).shape)
            trained = param.requires_grad and not self._frozen
            made = TreeParam(shape, trained, managed(param, self._only))
            self._params[id(param)] = made
            self.params[id(made)] = param
        return self._params[id(param)]


def ep_size_of(module: nn.Module) -> int:
    """Return the number of ranks over which a module's experts are spread, which a list of modules
    states itself (`moe.Experts`); 1 for any other module."""
    return int(getattr(module, "ep_size", 1)) if isinstance(module, nn.ModuleList) else 1


def _kind_of(module: nn.Module) -> ModuleKind:
    if isinstance(module, nn.Sequential):
        return ModuleKind.SEQUENCE
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return ModuleKind.CONTAINER
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        return ModuleKind.PARAMETERS
    return ModuleKind.PACKED_EXPERTS if _is_packed(module) else ModuleKind.PLAIN


def _is_packed(module: nn.Module) -> bool:
    """Return whether a module has experts of transformers 5, whose implementation can be chosen,
    and is the one that computes with one expert's rows at a time; or states that it stands for such
    ones.
    """
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    params = list(module.parameters())
    # its default, and ours, which has the same bits
    ours = chosen in ("grouped_mm", "offload") and _asks_the_registry(module)
    return (
        (ours or getattr(module, "stands_for_packed_experts", False))
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


def experts_per_token(values: Mapping[str, Any]) -> int | None:
    """Return the number that all layers share; None if none is named, or layers differ."""
    for key in _CHOSEN:
        if (found := _number(values.get(key))) is not None:
            return found
    for key in _INSIDE:
        inner = values.get(key)
        inner = inner if isinstance(inner, Mapping) else getattr(inner, "__dict__", None)
        if inner is not None and (found := experts_per_token(inner)) is not None:
            return found
    return _BY_TYPE.get(str(values.get("model_type")))


def experts_per_token_of(model: nn.Module) -> int | None:
    """Return the number from the model's configuration; without one, the number in its modules'
    attributes, if they agree on it."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        return experts_per_token(vars(config.get_text_config()))
    found = {
        number
        for module in model.modules()
        for name in _ATTRIBUTES
        if (number := _number(getattr(module, name, None))) is not None
    }
    return found.pop() if len(found) == 1 else None


def _number(value: Any) -> int | None:
    """Return one number, or that of a list with the same one for each layer; None otherwise."""
    if isinstance(value, list):
        return _number(value[0]) if value and all(each == value[0] for each in value) else None
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and value > 0 else None
