"""The memory for data shared by several ranks, where the model computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.planning.plan.sizes import ITEMSIZE, GroupBytes, largest_unit, pages
from offload.zero.groups.model_shape import ModelShape
from offload.zero.ranks.sharding import BUCKETS, Sharding

if TYPE_CHECKING:
    from offload.config import OffloadConfig


@dataclass(frozen=True)
class SharedPlan:
    """The bytes of one rank, in whole pages."""

    gather_nbytes: int  # parameters of the unit that runs and of the group behind it, whole
    bucket_nbytes: int  # a group's gradients, before they are reduced
    received_nbytes: int  # what all ranks send to this one of a group's gradients
    summed_nbytes: int  # their sum, fp32

    @property
    def workspace_nbytes(self) -> int:
        return self.received_nbytes + self.summed_nbytes

    @property
    def total_nbytes(self) -> int:
        return self.gather_nbytes + BUCKETS * self.bucket_nbytes + self.workspace_nbytes


def plan_shared(
    sharding: Sharding, model: ModelShape, groups: Sequence[GroupBytes], config: OffloadConfig,
    *, moves: bool,
) -> SharedPlan | None:  # fmt: skip
    """Plan the memory for working with other ranks; None for a single rank. `moves`: some
    parameters have their home elsewhere than where the model computes."""
    if sharding.world_size == 1:
        return None
    itemsize = ITEMSIZE[config.precision]
    shared = [index for index, group in enumerate(model.groups) if group.ranks * group.replicas > 1]
    layouts = [groups[index].layout for index in shared]
    shard = max((layout.shard_trainable for layout in layouts), default=0)
    sent = [
        groups[index].layout.numel_trainable
        * sent_nbytes(config, summed=model.groups[index].ep_size > 1)
        for index in shared
    ]
    contribution = max(sent, default=0)
    return SharedPlan(
        gather_nbytes=_gather_nbytes(sharding, model, groups, itemsize, moves=moves),
        bucket_nbytes=pages(contribution),
        received_nbytes=pages(contribution),
        summed_nbytes=pages(shard * 4),
    )


def sent_nbytes(config: OffloadConfig, *, summed: bool = False) -> int:
    """The bytes of an element of a gradient in transit, or of a sum of several."""
    rounded = config.zero.reduce_dtype
    if rounded != "fp32":
        return ITEMSIZE[rounded]
    return 4 if summed else ITEMSIZE[config.precision]


def _gather_nbytes(
    sharding: Sharding, model: ModelShape, groups: Sequence[GroupBytes], itemsize: int,
    *, moves: bool,
) -> int:  # fmt: skip
    # one group that is whole is brought up to date beside those that are used
    sizes = [
        group.parameters for shape, group in zip(model.groups, groups, strict=True)
        if moves and shape.ranks > 1 and not shape.sharding(sharding).parameters
    ]  # fmt: skip
    gathered = gather_room(model, itemsize) if sharding.parameters else 0
    return gathered + max(sizes, default=0)


def gather_room(model: ModelShape, itemsize: int) -> int:
    """The bytes for whole parameters on a rank that keeps only its shards: those of the largest
    unit and of the following group, or of all groups. `model` is cut into shards."""
    whole = [
        0 if group.ep_size > 1 or group.layout.is_stored else pages(group.layout.numel * itemsize)
        for group in model.groups
    ]
    return min(sum(whole), largest_unit(model, whole) + max(whole, default=0))
