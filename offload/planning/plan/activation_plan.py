"""The share of the budgets that saved activations may take.

Their bytes depend on the batch, which is not known before the first step: they get what the other
states leave.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.tiers.tier import PAGE_NBYTES, Tier

LEAST_WINDOW_NBYTES = 8 << 20  # four pieces of 2 MiB on their way at a time


@dataclass(frozen=True)
class ActivationPlan:
    """The bytes for saved activations that leave the device."""

    tier: Tier
    window_nbytes: int  # of host memory: their home, or what they pass through
    disk_nbytes: int  # most that lies on nvme at a time


def least_window(tier: Tier, gpu: bool) -> int:
    """The least host memory for activations with their home in `tier`; 0 if they stay in place.

    Where the model computes in host memory, the host tier is the same place as the device.
    """
    away = tier is Tier.NVME or (tier is Tier.HOST and gpu)
    return LEAST_WINDOW_NBYTES if away else 0


def share_out(
    tier: Tier, host_left_nbytes: int, nvme_left_nbytes: int, *, cached: bool
) -> ActivationPlan:
    """Divide the rest of the budgets, beside the least window, between activations and others.

    Activations get all of the host memory, or half if copies of other states (`cached`) or the
    pages of files want the rest. On nvme an eighth stays free, since rewritten extents of other
    states need holes of their size. They get 0 if nothing is left.
    """
    whole = tier is Tier.HOST and not cached
    more = max(0, host_left_nbytes if whole else host_left_nbytes // 2)
    window = LEAST_WINDOW_NBYTES + more // PAGE_NBYTES * PAGE_NBYTES
    disk = max(0, nvme_left_nbytes) * 7 // 8 if tier is Tier.NVME else 0
    return ActivationPlan(tier, window, disk)
