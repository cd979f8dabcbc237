"""The tiers: the places that have a byte budget, in order, fastest first; and where bytes are.

Code that means any tier asks what it is (`on_device`, `is_file`, `slower`); code that means the
memory of the CPU or of the device as such names `Tier.HOST` or `Tier.DEVICE`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

PAGE_NBYTES = 4096  # alignment of every extent: O_DIRECT and huge pages are content with it


class Medium(enum.Enum):
    """The medium of a tier, which decides which processor can compute with its bytes in place."""

    DEVICE = "the memory of the device that computes the model"
    HOST = "memory that the CPU addresses, and the device over its link"
    FILES = "files, which are read into memory of the host"


class Tier(enum.StrEnum):
    """A place with a byte budget; its value is its name in the configuration and in reports."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"

    @property
    def on_device(self) -> bool:
        return _MEDIA[self] is Medium.DEVICE

    @property
    def is_file(self) -> bool:
        return _MEDIA[self] is Medium.FILES

    @property
    def slower(self) -> tuple[Tier, ...]:
        """The tiers after this one."""
        tiers = tuple(Tier)
        return tiers[tiers.index(self) + 1 :]


_MEDIA = {Tier.DEVICE: Medium.DEVICE, Tier.HOST: Medium.HOST, Tier.NVME: Medium.FILES}


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of one tier. `offset_bytes` and `nbytes` are multiples of `PAGE_NBYTES`.

    `path_index` says which of a file tier's paths holds it (0 for memory tiers).
    """

    tier: Tier
    offset_bytes: int
    nbytes: int
    path_index: int = 0


class Residency(enum.Enum):
    """Says where the valid copies of a piece of state are now (its placement names its home).

    ABSENT    no memory is held; the home has the only valid copy
    ARRIVING  memory is held and a transfer is filling it; the home is valid
    CLEAN     memory and home are both valid; the copy in memory may be evicted at any time
    DIRTY     only the memory is valid: it was written and not written back yet
    LEAVING   memory is valid and a transfer is writing it back to its home
    """

    ABSENT = "absent"
    ARRIVING = "arriving"
    CLEAN = "clean"
    DIRTY = "dirty"
    LEAVING = "leaving"
