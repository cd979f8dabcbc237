"""A model without its values: its parameters, and the groups that move together.

All that planning needs to know. Made from modules by `ParameterGrouping.shape()`, or from a file's
header; works without torch and without the model's code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from offload.tiers.cached_layer import CachedLayer
from offload.tiers.errors import UnsupportedError
from offload.zero.groups.layout import Layout, ParamShape, lay_out
from offload.zero.groups.storage import Storage
from offload.zero.ranks.sharding import ALONE, Sharding

# A subtree this small is one unit: a hook per layer would cost more than moving it whole.
SMALL_UNIT_NUMEL = 1 << 16
# Experts that are this small together are not moved one by one, for the same reason.
SMALL_TABLE_NUMEL = 1 << 16


@dataclass(frozen=True)
class GroupShape:
    """Parameters that are gathered and released together, in module order."""

    name: str
    params: tuple[ParamShape, ...]
    ranks: int = 1  # each owns a shard
    replicas: int = 1  # copies of all shards
    table: str = ""  # the module of experts that it is one of: used where a router chooses it
    packed: bool = False  # its parameters are rows of the table's
    ep_size: int = 1  # over how many ranks the experts of its table are spread
    matrices: bool = False  # what it trains are matrices that are updated whole (Muon)

    @cached_property
    def layout(self) -> Layout:
        return lay_out(self.params, self.ranks, self.replicas, matrices=self.matrices)

    def sharding(self, of_all: Sharding) -> Sharding:
        """Return the ranks among which the group's states are shared: for spread experts, those
        that have the same ones; a group that is stored quantized is whole on each."""
        if any(param.stored is not None for param in self.params):
            return ALONE
        return of_all.of_experts(self.ep_size)

    @property
    def numel(self) -> int:
        """Elements, without padding."""
        return sum(param.numel for param in self.params)


@dataclass(frozen=True, slots=True)
class UnitShape:
    """A module with a forward, and the groups (by index) that it needs while it runs."""

    name: str
    groups: tuple[int, ...]
    repeated: bool = False  # one of the model's blocks
    table: str = ""  # the module of experts that it is one of


@dataclass(frozen=True)
class ModelShape:
    """Groups, and the units that use them in module order."""

    groups: tuple[GroupShape, ...]
    units: tuple[UnitShape, ...]
    experts_per_token: int | None = None  # chosen by a router; None: unknown
    cached: tuple[CachedLayer, ...] = ()  # layers with keys and values, where that is known

    @cached_property
    def tensors(self) -> int:
        """How many parameters there are."""
        return sum(len(group.params) for group in self.groups)

    @cached_property
    def tables(self) -> Mapping[str, tuple[int, ...]]:
        """The groups (by index) of each module of experts, by its name."""
        indices_of: dict[str, list[int]] = {}
        for index, group in enumerate(self.groups):
            if group.table:
                indices_of.setdefault(group.table, []).append(index)
        return {name: tuple(indices) for name, indices in indices_of.items()}

    def stored(self, storage: Storage | None) -> ModelShape:
        """Return the same model with frozen weights as `storage` has them, apart from those that
        are trained, with None as it is. It must be the last of these changes.

        A group with quantized weights is one of frozen parameters alone: nothing of it is updated,
        and its bytes at home are not those that the model computes with. So a unit that trains some
        of its parameters (adapters) and has others quantized has two groups:

            before    layers.0          ├ lora_A, lora_B ┤├ q_proj, k_proj, ..., norms ┤
            after     layers.0          ├ lora_A, lora_B ┤
                      layers.0, int4    ├ q_proj, k_proj, ..., norms ┤

        Raises ConfigError as `Storage.check`; UnsupportedError for experts that move one by one,
        of which some parameters are trained and others stored.
        """
        if storage is None:
            return self
        storage.check([param for group in self.groups for param in group.params])
        return self._recut(lambda group: _cut(group, storage))

    def with_matrices(self, names: Collection[str]) -> ModelShape:
        """Return the same model, the named parameters, which are trained, in groups of their own:
        those are updated whole, and have one state. It must come before `stored`. Raises
        UnsupportedError for a part of the parameters of experts."""
        for table, indices in self.tables.items():
            own = {param.name in names for index in indices for param in self.groups[index].params}
            if len(own) > 1:
                raise UnsupportedError(
                    f"use_muon: Muon trains some parameters of {table} and AdamW others; an expert "
                    "moves as a whole, so let one of the two train all of them"
                )
        return self._recut(lambda group: _cut_matrices(group, names)) if names else self

    @property
    def matrices(self) -> list[str]:
        """The parameters that Muon trains unless something else is said: the trained matrices of
        blocks, and experts of these alone that are no parts of a packed parameter."""
        inner = {index for unit in self.units if unit.repeated or unit.table
                 for index in unit.groups}  # fmt: skip
        groups = [self.groups[index] for index in sorted(inner)]
        return [
            param.name for group in groups for param in group.params
            if _is_matrix(param)
            and (not group.table or (not group.packed and all(map(_is_matrix, group.params))))
        ]  # fmt: skip

    def _recut(self, cut: Callable[[GroupShape], list[GroupShape]]) -> ModelShape:
        groups: list[GroupShape] = []
        numbers: list[range] = []  # the groups that each one is cut into
        for group in self.groups:
            parts = cut(group)
            numbers.append(range(len(groups), len(groups) + len(parts)))
            groups += parts
        units = (
            replace(unit, groups=tuple(new for index in unit.groups for new in numbers[index]))
            for unit in self.units
        )
        return replace(self, groups=tuple(groups), units=tuple(units))

    def sharded(self, ranks: int, replicas: int = 1) -> ModelShape:
        """Return the same model, every group in equal shards for `ranks`, `replicas` times, but for
        those that `GroupShape.sharding` has otherwise."""
        sharding = Sharding(ranks, replicas=replicas)
        groups = (
            replace(group, ranks=its.ranks, replicas=its.replicas)
            for group in self.groups
            for its in (group.sharding(sharding),)
        )
        return replace(self, groups=tuple(groups))

    @property
    def numel(self) -> int:
        """The number of parameters; tied ones count once."""
        return sum(group.numel for group in self.groups)

    @property
    def numel_of_all_ranks(self) -> int:
        """The number of parameters, including the experts that only other ranks have."""
        return sum(group.numel * group.ep_size for group in self.groups)

    @cached_property
    def numel_trainable(self) -> int:
        return sum(p.numel for group in self.groups for p in group.params if p.trainable)


def _cut(group: GroupShape, storage: Storage) -> list[GroupShape]:
    """Return a group with its weights as they are stored, or its trained parameters and its frozen
    ones where these are stored quantized."""
    params = tuple(
        replace(param, stored=storage.format) if storage.stores(param) else param
        for param in group.params
    )
    trained = tuple(param for param in params if param.trainable)
    if not trained or not any(param.stored for param in params):
        return [replace(group, params=params)]
    if group.table:
        raise UnsupportedError(
            f"storage.weights: {group.name} has trained parameters beside frozen ones that would "
            f"be stored in {storage.format.name}, and moves by itself; add {group.table} to "
            "storage.skip, or adapt other modules than the experts"
        )
    label = ", ".join(part for part in (group.name, storage.format.name) if part)
    frozen = tuple(param for param in params if not param.trainable)
    return [replace(group, params=trained), replace(group, name=label, params=frozen)]


def _is_matrix(param: ParamShape) -> bool:
    return param.trainable and len(param.shape) == 2


def _cut_matrices(group: GroupShape, names: Collection[str]) -> list[GroupShape]:
    """Return a group without the named matrices, and a group of these."""
    own = tuple(param for param in group.params if param.name in names)
    rest = tuple(param for param in group.params if param.name not in names)
    if not own or not rest:
        return [replace(group, matrices=bool(own))]
    label = ", ".join(part for part in (group.name, "matrices") if part)
    return [replace(group, params=rest), replace(group, name=label, params=own, matrices=True)]
