"""What saved activations may take of the budgets.

Their bytes depend on the batch, which is not known before the first step: they get what the other
states leave.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.tiers.extent import PAGE_NBYTES
from offload.tiers.tier import Tier

LEAST_WINDOW_NBYTES = 8 << 20  # four pieces of 2 MiB on their way at a time


@dataclass(frozen=True)
class ActivationPlan:
    """Saved activations away from the device. In bytes."""

    tier: Tier
    window_nbytes: int  # of host memory: their home, or what they pass through
    disk_nbytes: int  # most that lies on nvme at a time


def least_window(tier: Tier, gpu: bool) -> int:
    """Host memory that activations with their home in `tier` need at least; 0 where they stay.

    Where the model computes in host memory, the host tier is no other place than the device.
    """
    away = tier is Tier.NVME or (tier is Tier.HOST and gpu)
    return LEAST_WINDOW_NBYTES if away else 0


def share_out(
    tier: Tier, host_left_nbytes: int, nvme_left_nbytes: int, *, cached: bool
) -> ActivationPlan:
    """What activations get of what is left of the budgets beside the least window.

    Half of the host memory, if copies of other states (`cached`) or the pages of files want the
    rest, else all of it. On nvme an eighth stays free: extents of other states that are written
    anew must find holes of their size; 0 where nothing is left.
    """
    whole = tier is Tier.HOST and not cached
    more = max(0, host_left_nbytes if whole else host_left_nbytes // 2)
    window = LEAST_WINDOW_NBYTES + more // PAGE_NBYTES * PAGE_NBYTES
    disk = max(0, nvme_left_nbytes) * 7 // 8 if tier is Tier.NVME else 0
    return ActivationPlan(tier, window, disk)
