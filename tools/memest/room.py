"""What a system may fill: GPU memory, a node's RAM and its disks; and what of it is short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from offload.planning.plan.estimate import MemoryClass, PlaceEstimate
from offload.tiers.extent import TierName
from offload.tools.memest.profiles import HardwareProfile
from offload.tools.memest.subject import Ranks
from offload.tools.memest.systems import Bytes


@dataclass(frozen=True)
class Room:
    """Bytes of one GPU, of one node's RAM and of one node's disks. No GPU: 0, RAM is all."""

    device_nbytes: int
    host_nbytes: int
    nvme_nbytes: int

    def capacity(self, tier: TierName) -> int:
        by_tier = {
            TierName.DEVICE: self.device_nbytes,
            TierName.HOST: self.host_nbytes,
            TierName.NVME: self.nvme_nbytes,
        }
        return by_tier[tier]


def room_of(profile: HardwareProfile) -> Room:
    """All that the planner may use, too: every system is held to the same capacities."""
    return Room(profile.gpu_free_nbytes, profile.usable_ram_nbytes, profile.nvme_nbytes)


def places_of(held: Bytes, room: Room, ranks: Ranks) -> Mapping[TierName, PlaceEstimate]:
    """The books of a system beside what there is. Without a GPU its bytes are in RAM, too."""
    books = {tier: Counter(held.get(tier, {})) for tier in TierName}
    if not room.device_nbytes:
        for each, nbytes in books.pop(TierName.DEVICE).items():
            if each is not MemoryClass.FRAMEWORK:  # no context, no NCCL
                books[TierName.HOST][each] += nbytes * ranks.per_node
    return {
        tier: PlaceEstimate(room.capacity(tier), {m: book[m] for m in MemoryClass if book[m]})
        for tier, book in books.items()
    }


def too_full(places: Mapping[TierName, PlaceEstimate]) -> Iterator[TierName]:
    """The places that cannot hold their part."""
    for tier, place in places.items():
        if place.peak_nbytes > place.capacity_nbytes:
            yield tier
