"""How long the slowest link of a step is busy: which of two plans is likely to be faster.

Bytes over rates, no pipeline: for choosing what is worth a prediction (`step_time`), and all that
can be said where nothing is known of the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload.planning.machine.speeds import NOMINAL, Speeds
from offload.planning.plan.experts import Held
from offload.planning.plan.plan import Plan, needed_nbytes
from offload.planning.plan.sizes import CLASSES
from offload.tiers.tier import Tier

if TYPE_CHECKING:
    from offload.config import OffloadConfig

_BESIDE = 0.01  # of links beside the slowest: of plans that are as fast the one that moves less


def slowest_link_s(
    plan: Plan, config: OffloadConfig, speeds: Speeds, idle: Held | None = None
) -> float:
    """Of one step. Rates that are not known are those of `NOMINAL`. `idle`: bytes at home that a
    step leaves there."""
    passes = config.gradient_accumulation_steps
    links = [_nvme_s(plan, idle or {}, passes, config.optimizer.in_backward is True, speeds)]
    if plan.gpu:
        links += _beside_gpu_s(plan, idle or {}, passes, speeds)
    return max(links) + _BESIDE * sum(links)


def _nvme_s(plan: Plan, idle: Held, passes: int, ahead: bool, speeds: Speeds) -> float:
    """Parameters are read in both directions of a pass, less what has a copy in memory that is
    left; gradients go there and back unless updates use them at once (`ahead`)."""
    weights, gradients, records = _used(plan, idle, Tier.NVME)
    states = (passes - ahead) * gradients + records
    spare = _spare(plan, Tier.HOST)
    read = 2 * passes * max(0, weights - spare) + max(0, states - max(0, spare - weights))
    return read / (speeds.nvme_read_bytes_per_s or NOMINAL.nvme_read_bytes_per_s) + (
        weights + states
    ) / (speeds.nvme_write_bytes_per_s or NOMINAL.nvme_write_bytes_per_s)


def _beside_gpu_s(plan: Plan, idle: Held, passes: int, speeds: Speeds) -> list[float]:
    """To the GPU, from it, and the memory bus of what the CPU steps."""
    below = _used(plan, idle, Tier.HOST), _used(plan, idle, Tier.NVME)
    weights, gradients, records = map(sum, zip(*below, strict=True))
    down = 2 * passes * max(0, weights - _spare(plan, Tier.DEVICE))
    return [
        down / (speeds.host_to_device_bytes_per_s or NOMINAL.host_to_device_bytes_per_s),
        passes * gradients
        / (speeds.device_to_host_bytes_per_s or NOMINAL.device_to_host_bytes_per_s),
        2 * records / speeds.host_bytes_per_s,
    ]  # fmt: skip


def _used(plan: Plan, idle: Held, tier: Tier) -> list[int]:
    """By class, of what is at home in a tier."""
    left = idle.get(tier, {})
    return [plan.expected[tier].get(each, 0) - left.get(each, 0) for each in CLASSES]


def _spare(plan: Plan, tier: Tier) -> int:
    return max(0, plan.budgets[tier] - needed_nbytes(plan, tier))
