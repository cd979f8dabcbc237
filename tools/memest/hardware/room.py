"""What a system may fill: GPU memory, a node's RAM and its disks; and what of it is short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from offload.planning.plan.estimate import MemoryClass, PlaceEstimate
from offload.tiers.tier import Tier
from offload.tools.memest.hardware.profiles import HardwareProfile


@dataclass(frozen=True)
class Room:
    """Bytes of one GPU, of one node's RAM and of one node's disks. No GPU: 0, RAM is all."""

    device_nbytes: int
    host_nbytes: int
    nvme_nbytes: int

    def capacity(self, tier: Tier) -> int:
        by_tier = {
            Tier.DEVICE: self.device_nbytes,
            Tier.HOST: self.host_nbytes,
            Tier.NVME: self.nvme_nbytes,
        }
        return by_tier[tier]


def room_of(profile: HardwareProfile) -> Room:
    """The capacities that our planner has, too: every system is compared at the same ones."""
    return Room(profile.gpu_free_nbytes, profile.usable_ram_nbytes, profile.nvme_nbytes)


def places_of(
    held: Mapping[Tier, Mapping[MemoryClass, int]], room: Room, ranks_per_node: int
) -> Mapping[Tier, PlaceEstimate]:
    """The bytes that a system holds in each tier, and the tier's capacity. Without a GPU the bytes
    meant for it are in RAM.

    `held`: of one GPU, of one node's RAM and of one node's disks.
    """
    held_by_tier = {tier: Counter(held.get(tier, {})) for tier in Tier}
    if not room.device_nbytes:
        for each, nbytes in held_by_tier.pop(Tier.DEVICE).items():
            if each is not MemoryClass.FRAMEWORK:  # no context, no NCCL
                held_by_tier[Tier.HOST][each] += nbytes * ranks_per_node
    return {
        tier: PlaceEstimate(room.capacity(tier), {m: book[m] for m in MemoryClass if book[m]})
        for tier, book in held_by_tier.items()
    }


def too_full(places: Mapping[Tier, PlaceEstimate]) -> Iterator[Tier]:
    """The tiers whose bytes exceed their capacity."""
    for tier, place in places.items():
        if place.peak_nbytes > place.capacity_nbytes:
            yield tier
