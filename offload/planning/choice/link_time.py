"""The time for which a step's slowest link is busy, to tell which of two plans is likely faster.

It divides bytes by rates and ignores the pipeline. It selects the plans that are worth a prediction
(`step_time`), and replaces the prediction if a step's work is not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload.planning.machine.speeds import NOMINAL, Speeds
from offload.planning.plan.plan import Plan, needed_nbytes
from offload.planning.plan.sizes import CLASSES
from offload.tiers.tier import TIERS, Tier

if TYPE_CHECKING:
    from offload.config import OffloadConfig

_BESIDE = 0.01  # of links beside the slowest: of plans that are as fast the one that moves less


def slowest_link_s(plan: Plan, config: OffloadConfig, speeds: Speeds) -> float:
    """Seconds for which the slowest link of one step is busy. Unknown rates are those of
    `NOMINAL`."""
    passes = config.gradient_accumulation_steps
    links = [_nvme_s(plan, passes, config.optimizer.in_backward is True, speeds)]
    if plan.gpu:
        links += _beside_gpu_s(plan, passes, speeds)
    links += [_link_s(plan, passes, tier) for tier in TIERS if tier.bytes_per_s]
    return max(links) + _BESIDE * sum(links)


def _nvme_s(plan: Plan, passes: int, ahead: bool, speeds: Speeds) -> float:
    """Seconds of nvme. Parameters are read in both directions of a pass, unless spare memory has a
    copy; gradients are written and read back unless updates use them at once (`ahead`)."""
    weights, gradients, records = _used(plan, Tier.NVME)
    states = (passes - ahead) * gradients + records
    spare = _spare(plan, Tier.HOST)
    read = 2 * passes * max(0, weights - spare) + max(0, states - max(0, spare - weights))
    return read / (speeds.nvme_read_bytes_per_s or NOMINAL.nvme_read_bytes_per_s) + (
        weights + states
    ) / (speeds.nvme_write_bytes_per_s or NOMINAL.nvme_write_bytes_per_s)


def _beside_gpu_s(plan: Plan, passes: int, speeds: Speeds) -> list[float]:
    """Seconds of the links to and from the GPU, and of the memory bus for updates on the CPU."""
    below = [_used(plan, tier) for tier in TIERS if not tier.on_device]
    weights, gradients, records = map(sum, zip(*below, strict=True))
    down = 2 * passes * max(0, weights - _spare(plan, Tier.DEVICE))
    return [
        down / (speeds.host_to_device_bytes_per_s or NOMINAL.host_to_device_bytes_per_s),
        passes * gradients
        / (speeds.device_to_host_bytes_per_s or NOMINAL.device_to_host_bytes_per_s),
        2 * records / speeds.host_bytes_per_s,
    ]  # fmt: skip


def _link_s(plan: Plan, passes: int, tier: Tier) -> float:
    """Seconds of the link of a further tier, whose states nothing has copies of on a CPU."""
    weights, gradients, records = _used(plan, tier)
    return 2 * (passes * (weights + gradients) + records) / tier.bytes_per_s


def _used(plan: Plan, tier: Tier) -> list[int]:
    """The bytes at home in a tier, by class."""
    return [plan.expected[tier].get(each, 0) for each in CLASSES]


def _spare(plan: Plan, tier: Tier) -> int:
    return max(0, plan.budgets[tier] - needed_nbytes(plan, tier))
