"""The parts of every group that each rank owns (ZeRO: Rajbhandari et al., 2020).

World of `replicas x ranks` processes. The ranks of one shard group own a shard of every group each
and together one copy of the states; replicas do the same with other data (HSDP; hpZ of ZeRO++;
MiCS). A stage says what is kept whole on every rank all the same:

    stage      0        1        2        3
    optimizer  whole    shard    shard    shard      stage 0: shard groups of one rank
    gradients  whole    whole    shard    shard      whole: while `no_sync` lasts
    parameters whole    whole    whole    shard
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.tiers.errors import ConfigError
from offload.zero.groups.layout import Layout, ParamSpec

if TYPE_CHECKING:
    from offload.kernels.floats import Array


@dataclass(frozen=True, slots=True)
class Sharding:
    """This rank's place among those that train together."""

    ranks: int = 1  # in its shard group
    rank: int = 0  # its number there
    replicas: int = 1  # shard groups
    replica: int = 0  # the number of its own
    parameters: bool = False  # a rank keeps its shard of the parameters only

    @property
    def world_size(self) -> int:
        return self.ranks * self.replicas

    @classmethod
    def of(cls, stage: int, shard_group: int | None, world_size: int, rank: int) -> Sharding:
        """Return a rank's place: neighbouring ranks share a shard group. Raises ConfigError if
        groups do not come out even."""
        ranks = 1 if stage == 0 else shard_group or world_size
        if world_size % ranks:
            raise ConfigError(
                f"zero.shard_group: {ranks} does not divide the {world_size} ranks of this run; "
                f"set it to a divisor of {world_size}, or leave it out for one group"
            )
        return cls(
            ranks, rank % ranks, world_size // ranks, rank // ranks,
            parameters=stage >= 3 and ranks > 1,
        )  # fmt: skip

    def of_experts(self, ep_size: int) -> Sharding:
        """Return the place of experts that are spread over `ep_size` neighbouring ranks each time:
        among the ranks with the same ones. Their parameters are whole at every stage: a rank's
        tokens decide which ones it uses."""
        if ep_size == 1:
            return self
        place = self.replica * self.ranks + self.rank
        count, number = self.world_size // ep_size, place // ep_size
        if self.ranks == 1:
            return Sharding(replicas=count, replica=number)
        return Sharding(count, number)


ALONE = Sharding()

BUCKETS = 2  # for gradients: one is filled while the other is reduced


@dataclass(frozen=True, slots=True)
class PartOfParam:
    """The range of one parameter that lies in a rank's part."""

    index: int  # of the parameter in the group's layout
    start: int  # its first element there, counted in the parameter
    spec: ParamSpec  # 1D, at an offset counted from the first element of the part


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a group's flat buffer. Ranges count elements of the whole buffer."""

    layout: Layout
    trainable: range
    frozen: range
    is_shard: bool = False  # the group's state in host memory is this part alone

    @classmethod
    def of(cls, layout: Layout, rank: int, *, is_shard: bool = False) -> Part:
        trained, frozen = layout.shard_trainable, layout.shard_frozen
        first = layout.numel_trainable + rank * frozen
        return cls(
            layout, range(rank * trained, (rank + 1) * trained), range(first, first + frozen),
            is_shard,
        )  # fmt: skip

    def trained_in(self, host: Array) -> Array:
        """Return the elements that this rank updates, of the group's elements in host memory."""
        start = 0 if self.is_shard else self.trainable.start
        return host[start : start + len(self.trainable)]

    def frozen_in(self, host: Array) -> Array:
        """Return this rank's part of the elements that are never updated, likewise."""
        start = len(self.trainable) if self.is_shard else self.frozen.start
        return host[start : start + len(self.frozen)]

    def trained(self) -> Iterator[PartOfParam]:
        """Yield the parameters in the trainable part, in order."""
        for index, spec in enumerate(self.layout.params):
            lo, hi = max(spec.offset, self.trainable.start), min(spec.stop, self.trainable.stop)
            if spec.trainable and (lo < hi or self.layout.ranks == 1):
                shape = spec.shape if self.layout.ranks == 1 else (hi - lo,)
                offset = lo - self.trainable.start
                yield PartOfParam(
                    index, lo - spec.offset, ParamSpec(spec.names, shape, offset=offset)
                )
