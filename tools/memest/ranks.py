"""One rank's share of a model whose states are spread evenly over all ranks (ZeRO-3).

every state          1 / ranks of each parameter
while a unit runs    all of its parameters, gathered from all ranks
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload.config import OffloadConfig
from offload.planning.estimate import MemoryClass, MemoryEstimate, PlaceEstimate
from offload.planning.plan_sizes import ITEMSIZE
from offload.tiers.extent import TierName
from offload.tools.memest.profiles import HardwareProfile
from offload.tools.memest.systems_ours import shard
from offload.zero.model_shape import ModelShape


@dataclass(frozen=True)
class Share:
    """What one rank holds, and the model it is a share of."""

    shape: ModelShape
    whole: ModelShape
    ranks: int

    def gathered_nbytes(self, config: OffloadConfig) -> int:
        """Most bytes of a unit's parameters that other ranks own, while it runs."""
        numels = [group.numel for group in self.whole.groups]
        units = [sum(numels[index] for index in unit.groups) for unit in self.whole.units]
        others = max(units, default=0) * (self.ranks - 1) // self.ranks
        return others * ITEMSIZE[config.precision]

    def with_gathered(
        self, memory: MemoryEstimate, config: OffloadConfig, *, gpu: bool
    ) -> MemoryEstimate:
        """`memory` with what is gathered counted as staging where the model computes."""
        more = self.gathered_nbytes(config)
        tier = TierName.DEVICE if gpu else TierName.HOST
        if not more:
            return memory
        place = memory.places[tier]
        staging = place.by_class.get(MemoryClass.STAGING, 0) + more
        by_class = {**place.by_class, MemoryClass.STAGING: staging}
        places = {**memory.places, tier: PlaceEstimate(place.capacity_nbytes, by_class)}
        return replace(memory, places=places)


def share_of(model: ModelShape, profile: HardwareProfile) -> Share:
    """One rank's share; the model itself where there is one rank."""
    return Share(shard(model, profile.ranks), model, profile.ranks)
