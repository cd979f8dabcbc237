"""The device memory of the offload kernels, and whether they can run at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from offload.kernels.floats import NORM_BLOCK, norm_blocks
from offload.planning.plan.sizes import (
    GroupBytes,
    Placements,
    Sizes,
    class_of,
    pages,
    tiers_of,
)
from offload.tiers.errors import UnsupportedError
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.tiers.units import round_up
from offload.zero.step.records import ALIGN_NBYTES

# Where a buffer is filled, one leaves, and two more let a burst of small gradients through.
_RING_BUFFERS = 4
_MOST_OUTBOX_NBYTES = 16 << 20  # a third of a millisecond of a fast link
_OUTBOX_SHARE = 1 / 32  # of the device budget, for all buffers, as long as a buffer has its least
_STAGING_BUFFERS = 3  # arriving | being stepped | leaving


@dataclass(frozen=True)
class DevicePlan:
    """Device memory beside that of states, in bytes of whole pages."""

    ring_buffers: int
    ring_nbytes: int  # of one buffer
    staging_buffers: int
    staging_nbytes: int  # of one buffer
    partials_numel: int  # fp64 sums of squares

    @property
    def partials_nbytes(self) -> int:
        return pages(self.partials_numel * 8) if self.partials_numel else 0

    @property
    def total_nbytes(self) -> int:
        ring = self.ring_buffers * self.ring_nbytes
        return ring + self.staging_buffers * self.staging_nbytes + self.partials_nbytes


def plan_device(
    placements: Placements, kinds: Mapping[GroupBytes, int], sizes: Sizes, budget_nbytes: int,
    kernels_missing: str | None,
) -> DevicePlan | None:  # fmt: skip
    """Plan the memory of kernels on the GPU; None if kernels cannot run (`kernels_missing` says
    why). `kinds` maps a group of each kind to their number.

    `placements` are the requested ones; gradients and optimizer states without one never go to the
    device. Raises UnsupportedError if they have one there and no kernel can run.
    """
    if kernels_missing is not None:
        _check_unneeded(placements, kinds, kernels_missing)
        return None
    together = max((group.layout.shard_trainable for group in kinds), default=0)
    leave = together > 0 and tiers_of(placements, StateClass.GRADIENTS) != {Tier.DEVICE}
    stepped = Tier.DEVICE in tiers_of(placements, StateClass.OPTIMIZER)
    staging = _staging_nbytes(placements, kinds, sizes) if stepped else 0
    largest = max((numel for group in kinds for numel in group.trained_numels), default=0)
    return DevicePlan(
        ring_buffers=_RING_BUFFERS if leave else 0,
        ring_nbytes=_ring_nbytes(largest, together, budget_nbytes) if leave else 0,
        staging_buffers=_STAGING_BUFFERS if staging else 0,
        staging_nbytes=staging,
        partials_numel=sum(
            count * sum(map(norm_blocks, group.trained_numels)) for group, count in kinds.items()
        ),
    )


def _check_unneeded(
    placements: Placements, groups: Iterable[GroupBytes], kernels_missing: str
) -> None:  # fmt: skip
    """Raise UnsupportedError for what only kernels on the GPU can do."""
    for placed, home in placements.items():
        if class_of(placed) is not StateClass.PARAMETERS and Tier.DEVICE in home.tiers:
            raise UnsupportedError(
                f"placement.{placed}: device needs kernels on the GPU, and {kernels_missing}; or "
                f"set placement.{placed}: host"
            )
    if any(group.decoded for group in groups):
        raise UnsupportedError(
            f"storage.weights: codes are decoded by kernels on the GPU, and {kernels_missing}; or "
            "remove storage"
        )


def _ring_nbytes(largest: int, together: int, budget_nbytes: int) -> int:
    """The bytes of one buffer: any gradient, or as many whole blocks of the norm as are useful. It
    holds all gradients of a group (`together` elements), as one copy, if their share allows."""
    shared = int(budget_nbytes * _OUTBOX_SHARE) // _RING_BUFFERS
    block = NORM_BLOCK * 4
    whole = min(_MOST_OUTBOX_NBYTES, max(block, shared // block * block))
    least = min(whole, pages(largest * 4))
    group = pages(together * 4)
    return max(least, group) if group <= min(_MOST_OUTBOX_NBYTES, shared) else least


def _staging_nbytes(placements: Placements, groups: Iterable[GroupBytes], sizes: Sizes) -> int:
    """The bytes of one buffer: the parts of the largest chunk that may be copied to the device."""
    longest = max((group.layout.shard_numel for group in groups), default=0)
    numel = min(sizes.chunk_numel, longest)
    nbytes = 0
    if tiers_of(placements, StateClass.PARAMETERS) != {Tier.DEVICE}:
        nbytes += round_up(numel * sizes.itemsize, ALIGN_NBYTES)
    if tiers_of(placements, StateClass.GRADIENTS) != {Tier.DEVICE}:
        nbytes += round_up(numel * 4, ALIGN_NBYTES)  # the sums of several passes, planned or not
    return pages(nbytes) if nbytes else 0
