"""The memory for data on its way, beside that of states.

update     staging buffers, in host memory
kernels    on a GPU, if they can run there: gradients that leave, records that are stepped there
ranks      where the model computes: whole parameters, gradients before and after reductions
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.kernels.floats import NORM_BLOCK, norm_blocks
from offload.kernels.newton_schulz import products_nbytes
from offload.planning.plan.sizes import (
    ITEMSIZE,
    GroupBytes,
    Placements,
    Sizes,
    largest_unit,
    pages,
    pages_or_none,
    tiers_of,
)
from offload.tiers.errors import UnsupportedError
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.tiers.units import round_up
from offload.zero.groups.model_shape import ModelShape
from offload.zero.ranks.sharding import BUCKETS, Sharding
from offload.zero.step.records import ALIGN_NBYTES

if TYPE_CHECKING:
    from offload.config import OffloadConfig

# Where a buffer is filled, one leaves, and two more let a burst of small gradients through.
_RING_BUFFERS = 4
_MAX_OUTBOX_NBYTES = 16 << 20  # a third of a millisecond of a fast link
_OUTBOX_SHARE = 1 / 32  # of the device budget, for all buffers, as long as a buffer has its least
_STAGING_BUFFERS = 3  # arriving | being stepped | leaving


# ---------------------------------------------------------------- update
def kinds_of(groups: Sequence[GroupBytes]) -> dict[GroupBytes, int]:
    """A group of each kind (those with parts of equal length), and the number of such groups."""
    kinds: defaultdict[object, list[GroupBytes]] = defaultdict(list)
    for group in groups:
        layout, stored = group.layout, bool(group.dequantized)
        key = (
            layout.shard_numel, layout.shard_trainable, group.trained_numels, stored,
            tuple(spec.shape for spec in layout.params) if group.matrices else (),
        )  # fmt: skip
        kinds[key].append(group)
    return {alike[0]: len(alike) for alike in kinds.values()}


def staging_nbytes_of(
    placements: Placements, groups: Iterable[GroupBytes], sizes: Sizes, gpu: bool
) -> int:  # fmt: skip
    """The bytes of one buffer: the largest chunk of every class that an update may stage."""
    trained = (g.layout for g in groups if g.layout.numel_trainable)
    numel = min(sizes.chunk_numel, max((layout.shard_numel for layout in trained), default=0))
    if not numel:
        return 0
    per_class = {
        StateClass.PARAMETERS: pages(numel * sizes.itemsize),
        StateClass.GRADIENTS: pages(numel * sizes.gradient_itemsize),
        StateClass.OPTIMIZER: sizes.record_nbytes(numel),
    }
    staged = {state_class: {Tier.NVME} for state_class in per_class}
    if gpu:  # records there are stepped there
        staged[StateClass.PARAMETERS].add(Tier.DEVICE)
        staged[StateClass.GRADIENTS].add(Tier.DEVICE)
        if Tier.DEVICE in tiers_of(placements, StateClass.GRADIENTS):
            # also fp32 sums of more passes than were planned; planned on nvme, they stay on host
            per_class[StateClass.GRADIENTS] = pages(numel * 4)
    return sum(
        nbytes for state_class, nbytes in per_class.items()
        if staged[state_class] & tiers_of(placements, state_class)
    )  # fmt: skip


def held_chunks(groups: Iterable[GroupBytes], chunk_numel: int) -> int:
    """The chunks that the largest matrix lies in, which wait for its products."""
    largest = max((math.prod(shape) for shape in _matrices(groups)), default=0)
    return -(-(largest - 1) // chunk_numel) + 1 if largest else 0


def products_of(groups: Iterable[GroupBytes], itemsize: int, *, gpu: bool) -> tuple[int, int]:
    """The bytes for the products of any of Muon's matrices where the model computes, and beside a
    GPU for the input of the largest."""
    shapes = _matrices(groups)
    needed = max((products_nbytes(shape, itemsize) for shape in shapes), default=0)
    largest = max((math.prod(shape) for shape in shapes), default=0) if gpu else 0
    return pages_or_none(needed), pages_or_none(4 * largest)


def _matrices(groups: Iterable[GroupBytes]) -> set[tuple[int, ...]]:
    return {spec.shape for group in groups if group.matrices for spec in group.layout.params}


# ---------------------------------------------------------------- kernels
@dataclass(frozen=True)
class DevicePlan:
    """Memory of kernels beside that of states, in bytes of whole pages."""

    ring_buffers: int
    ring_nbytes: int  # of one buffer
    landing_buffers: int  # as long, in host memory: for gradients that are added there
    staging_buffers: int
    staging_nbytes: int  # of one buffer
    partials_numel: int  # fp64 sums of squares

    @property
    def partials_nbytes(self) -> int:
        return pages(self.partials_numel * 8) if self.partials_numel else 0

    @property
    def total_nbytes(self) -> int:
        """The bytes of device memory."""
        ring = self.ring_buffers * self.ring_nbytes
        return ring + self.staging_buffers * self.staging_nbytes + self.partials_nbytes


def plan_device(
    placements: Placements, kinds: Mapping[GroupBytes, int], sizes: Sizes, budget_nbytes: int,
    passes: int, kernels_missing: str | None,
) -> DevicePlan | None:  # fmt: skip
    """Plan the memory of kernels on the GPU; None if kernels cannot run (`kernels_missing` says
    why). `kinds` maps a group of each kind to their number; a step has so many backward `passes`.

    `placements` are the requested ones; gradients and optimizer states without one never go to the
    device. Raises UnsupportedError if they have one there and no kernel can run.
    """
    if kernels_missing is not None:
        _check_unneeded(placements, kinds, kernels_missing)
        return None
    together = max((group.layout.shard_trainable for group in kinds), default=0)
    leave = together > 0 and tiers_of(placements, StateClass.GRADIENTS) != {Tier.DEVICE}
    largest = max((numel for group in kinds for numel in group.trained_numels), default=0)
    staging = 0  # the parts of the largest chunk that may be copied to the device
    if Tier.DEVICE in tiers_of(placements, StateClass.OPTIMIZER):
        longest = max((group.layout.shard_numel for group in kinds), default=0)
        numel = min(sizes.chunk_numel, longest)
        if tiers_of(placements, StateClass.PARAMETERS) != {Tier.DEVICE}:
            staging += round_up(numel * sizes.itemsize, ALIGN_NBYTES)
        if tiers_of(placements, StateClass.GRADIENTS) != {Tier.DEVICE}:
            staging += round_up(numel * 4, ALIGN_NBYTES)  # sums of several passes, planned or not
    return DevicePlan(
        ring_buffers=_RING_BUFFERS if leave else 0,
        landing_buffers=_RING_BUFFERS if leave and passes > 1 else 0,
        ring_nbytes=_ring_nbytes(largest, together, budget_nbytes) if leave else 0,
        staging_buffers=_STAGING_BUFFERS if staging else 0,
        staging_nbytes=pages_or_none(staging),
        partials_numel=sum(
            count * sum(map(norm_blocks, group.trained_numels)) for group, count in kinds.items()
        ),
    )


def _check_unneeded(
    placements: Placements, groups: Iterable[GroupBytes], kernels_missing: str
) -> None:  # fmt: skip
    """Raise UnsupportedError for what only kernels on the GPU can do."""
    for name, home in placements.items():
        if name is not StateClass.PARAMETERS and Tier.DEVICE in home.tiers:
            raise UnsupportedError(
                f"placement.{name}: device needs kernels on the GPU, and {kernels_missing}; or "
                f"set placement.{name}: host"
            )
    if any(group.dequantized for group in groups):
        raise UnsupportedError(
            f"storage.weights: kernels on the GPU dequantize weights, and {kernels_missing}; or "
            "remove storage"
        )


def _ring_nbytes(largest: int, together: int, budget_nbytes: int) -> int:
    """The bytes of one buffer: any gradient, or as many whole blocks of the norm as are useful. It
    holds all gradients of a group (`together` elements), as one copy, if their share allows."""
    shared = int(budget_nbytes * _OUTBOX_SHARE) // _RING_BUFFERS
    block = NORM_BLOCK * 4
    whole = min(_MAX_OUTBOX_NBYTES, max(block, shared // block * block))
    min_nbytes = min(whole, pages(largest * 4))
    group = pages(together * 4)
    return max(min_nbytes, group) if group <= min(_MAX_OUTBOX_NBYTES, shared) else min_nbytes


# ---------------------------------------------------------------- ranks
@dataclass(frozen=True)
class SharedPlan:
    """The bytes of one rank, in whole pages."""

    gather_nbytes: int  # parameters of the unit that runs and of the group behind it, whole
    received_nbytes: int  # a group's gradients: in a bucket, and as all ranks send them to this one
    summed_nbytes: int  # their sum, fp32

    @property
    def workspace_nbytes(self) -> int:
        return self.received_nbytes + self.summed_nbytes

    @property
    def total_nbytes(self) -> int:
        return self.gather_nbytes + BUCKETS * self.received_nbytes + self.workspace_nbytes


def plan_shared(
    sharding: Sharding, model: ModelShape, groups: Sequence[GroupBytes], config: OffloadConfig,
    *, moves: bool,
) -> SharedPlan | None:  # fmt: skip
    """Plan the memory for working with other ranks; None for a single rank. `moves`: some
    parameters have their home elsewhere than where the model computes."""
    if sharding.world_size == 1:
        return None
    itemsize = ITEMSIZE[config.precision]
    pairs = list(zip(model.groups, groups, strict=True))
    shared = [(shape, group.layout) for shape, group in pairs if shape.ranks * shape.replicas > 1]
    sent = (
        layout.numel_trainable * sent_nbytes(config, summed=shape.ep_size > 1)
        for shape, layout in shared
    )
    # one group that is whole is brought up to date beside those that are used
    whole = (
        group.parameters for shape, group in pairs
        if moves and shape.ranks > 1 and not shape.sharding(sharding).parameters
    )  # fmt: skip
    gathered = gather_room(model, itemsize) if sharding.parameters else 0
    return SharedPlan(
        gather_nbytes=gathered + max(whole, default=0),
        received_nbytes=pages(max(sent, default=0)),
        summed_nbytes=pages(max((4 * each.shard_trainable for _, each in shared), default=0)),
    )


def sent_nbytes(config: OffloadConfig, *, summed: bool = False) -> int:
    """The bytes of an element of a gradient in transit, or of a sum of several."""
    rounded = config.zero.reduce_dtype
    if rounded != "fp32":
        return ITEMSIZE[rounded]
    return 4 if summed else ITEMSIZE[config.precision]


def gather_room(model: ModelShape, itemsize: int) -> int:
    """The bytes for whole parameters on a rank that keeps only its shards: those of the largest
    unit and of the following group, or of all groups. `model` is cut into shards."""
    whole = [
        0 if each.ep_size > 1 or each.layout.is_quantized else pages(each.layout.numel * itemsize)
        for each in model.groups
    ]
    return min(sum(whole), largest_unit(model, whole) + max(whole, default=0))
