"""One case to estimate: a model, a configuration, a step's input, and hardware."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from offload.config import OffloadConfig
from offload.planning.machine.speeds import Speeds
from offload.planning.plan.estimate import Workload
from offload.planning.plan.plan import Hardware
from offload.planning.plan.sizes import planned_shape
from offload.tools.memest.generation import Generation, kv_in_tiers
from offload.tools.memest.hardware.profiles import HardwareProfile
from offload.tools.memest.source.model_source import ModelSource
from offload.zero.groups.layout import ParamShape
from offload.zero.groups.model_shape import ModelShape, UnitShape
from offload.zero.ranks.sharding import Sharding


@dataclass(frozen=True)
class Case:
    """Everything that an answer depends on. `speeds` are one rank's; None if they are not known."""

    source: ModelSource
    config: OffloadConfig
    workload: Workload
    profile: HardwareProfile
    speeds: Speeds | None
    generation: Generation | None = None  # None: training; else `workload` is its usual pass

    @cached_property
    def shape(self) -> ModelShape:
        """The model as it is planned; its experts are separate if the configuration allows it, and
        frozen weights are as they are stored."""
        shape = self.source.shape
        if self.generation is not None:
            groups = (
                replace(group, params=tuple(replace(p, trainable=False) for p in group.params))
                for group in shape.groups
            )
            shape = replace(shape, groups=tuple(groups))
        if not self.config.splits_experts(self.profile.ranks):
            shape = _joined(shape)
        shape = planned_shape(self.config, shape)
        # the tokens are those of the configuration
        return kv_in_tiers(self.config, shape, self.source.cache, batch=1, tokens=1)[1]

    @property
    def sharding(self) -> Sharding:
        """The sharding of the first rank, whose shards are as long as all others'. Raises
        ConfigError if shard groups do not divide the ranks."""
        zero = self.config.zero
        return Sharding.of(zero.stage, zero.shard_group, self.profile.ranks, 0)

    @property
    def timed(self) -> bool:
        """Whether a step can be predicted: work and speeds are known. Of the network between ranks
        nothing is."""
        return self.speeds is not None and self.source.has_graph and self.profile.ranks == 1

    @property
    def hardware(self) -> Hardware:
        """The hardware that the first rank's plan may use."""
        return self.profile.hardware(self.sharding)


@dataclass(frozen=True)
class Question:
    """A question that was read: a case, the configuration as it was given, and the assumptions."""

    case: Case
    asked: OffloadConfig
    assumed: tuple[str, ...]


def _joined(model: ModelShape) -> ModelShape:
    """The same model with the experts of a block in the block's group, where they are not to move
    one by one: as `group_parameters(..., experts=False)` has it, but for the order in a group."""
    home: dict[int, int] = {}  # an expert's group -> its block's
    block: UnitShape | None = None
    for unit in model.units:
        block = unit if unit.repeated else block
        if unit.table and block is not None and unit.table.startswith(f"{block.name}."):
            home.update((index, block.groups[0]) for index in unit.groups if block.groups)
    extra: dict[int, list[ParamShape]] = defaultdict(list)
    for index, into in home.items():
        extra[into] += model.groups[index].params
    kept = [index for index in range(len(model.groups)) if index not in home]
    numbers = {index: number for number, index in enumerate(kept)}
    groups = (
        replace(g, params=(*g.params, *_unpacked(extra[index])), table="", packed=False)
        for index in kept
        for g in (model.groups[index],)
    )
    units = (
        replace(unit, groups=tuple(numbers[index] for index in unit.groups), table="")
        for unit in model.units
        if home.keys().isdisjoint(unit.groups)
    )
    return replace(model, groups=tuple(groups), units=tuple(units))


def _unpacked(rows: Sequence[ParamShape]) -> Iterator[ParamShape]:
    """Yield the packed parameters in place of their rows; others as they are."""
    packed: dict[tuple[str, ...], list[ParamShape]] = defaultdict(list)
    for row in rows:
        packed[tuple(name.rpartition("[")[0] or name for name in row.names)].append(row)
    for names, some in packed.items():
        first = some[0]
        is_row = names != first.names
        yield ParamShape(
            names, (len(some), *first.shape) if is_row else first.shape, first.trainable
        )
