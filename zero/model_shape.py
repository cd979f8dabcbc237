"""A model without its values: which parameters there are, and which move together.

All that planning needs to know. Made from modules by `Discovery.shape()`, or from a file's header;
works without torch and without the model's code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from offload.zero.layout import Layout, ParamShape, lay_out


@dataclass(frozen=True)
class GroupShape:
    """Parameters that are gathered and released together, in module order."""

    name: str
    params: tuple[ParamShape, ...]
    ranks: int = 1  # that own a shard each
    replicas: int = 1  # of all shards
    table: str = ""  # the module of experts that it is one of: used where a router chooses it
    packed: bool = False  # its parameters are rows of the table's

    @cached_property
    def layout(self) -> Layout:
        return lay_out(self.params, self.ranks, self.replicas)

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
    experts_per_token: int | None = None  # that a router chooses, where that is known

    @cached_property
    def tables(self) -> Mapping[str, tuple[int, ...]]:
        """The groups (by index) of each module of experts, by its name."""
        found: dict[str, list[int]] = {}
        for index, group in enumerate(self.groups):
            if group.table:
                found.setdefault(group.table, []).append(index)
        return {name: tuple(indices) for name, indices in found.items()}

    def sharded(self, ranks: int, replicas: int = 1) -> ModelShape:
        """The same model, every group in equal shards for `ranks`, `replicas` times."""
        groups = (replace(group, ranks=ranks, replicas=replicas) for group in self.groups)
        return replace(self, groups=tuple(groups))

    @property
    def numel(self) -> int:
        """Parameters; tied ones count once."""
        return sum(group.numel for group in self.groups)

    @property
    def numel_trainable(self) -> int:
        return sum(p.numel for group in self.groups for p in group.params if p.trainable)

    @property
    def shared(self) -> frozenset[int]:
        """Groups that several units use: with micro-batches they get a gradient from each."""
        uses = Counter(index for unit in self.units for index in unit.groups)
        return frozenset(index for index, count in uses.items() if count > 1)
