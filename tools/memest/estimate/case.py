"""One case to estimate: a model, a configuration, a step's input, and hardware."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from offload.config import OffloadConfig
from offload.planning.machine.speeds import Speeds
from offload.planning.plan.estimate import Workload
from offload.planning.plan.plan import Hardware
from offload.tools.memest.generation import Generation, kv_in_tiers
from offload.tools.memest.hardware.profiles import HardwareProfile
from offload.tools.memest.source.model_source import ModelSource
from offload.zero.groups.model_shape import ModelShape
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
            shape = shape.frozen
        if not self.config.splits_experts(self.profile.ranks):
            shape = shape.joined
        shape = shape.stored(self.config.stored)
        if self.generation is None:
            return shape
        asked, cache = self.generation, self.source.cache
        return kv_in_tiers(self.config, shape, cache, asked.batch, asked.context)[1]

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
