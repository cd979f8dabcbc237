"""The tiers: the places that have a byte budget, in order, fastest first.

Code that means any tier asks what it is (`on_device`, `is_file`, `slower`); code that means the
memory of the CPU or of the device as such names `Tier.HOST` or `Tier.DEVICE`.
"""

from __future__ import annotations

import enum


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
