"""The tiers: the registered places that have a byte budget, fastest first; and where bytes are.

Code that means any tier goes through `TIERS` and asks what each is (`on_device`, `is_file`,
`slower`); code that means the memory of the CPU or of the device as such names `Tier.HOST` or
`Tier.DEVICE`, and code that means swap files names `Tier.NVME`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from offload.tiers.memory import Memory

    OpenMemory = Callable[[int, torch.device], Memory]  # bytes, beside the device that computes
else:
    OpenMemory = Callable

PAGE_NBYTES = 4096  # alignment of every extent: O_DIRECT and huge pages are content with it


class Medium(enum.Enum):
    """The medium of a tier, which decides which processor can compute with its bytes in place."""

    DEVICE = "the memory of the device that computes the model"
    HOST = "memory that the CPU addresses, and the device over its link"
    FILES = "files, which are read into memory of the host"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Tier:
    """A place with a byte budget. There is one object per name; `register` makes it known."""

    DEVICE: ClassVar[Tier]
    HOST: ClassVar[Tier]
    NVME: ClassVar[Tier]

    name: str  # in the configuration and in reports
    title: str  # the place in words
    medium: Medium
    capacity_nbytes: int = 0  # its budget where that is open; 0: the machine is asked
    bytes_per_s: float = 0.0  # of its link; 0: as is measured of the machine
    open_memory: OpenMemory | None = None  # None: as is usual for the medium

    @classmethod
    def named(cls, name: str) -> Tier:
        """Return the registered tier of that name. Raises KeyError if there is none."""
        return {tier.name: tier for tier in TIERS}[name]

    @property
    def on_device(self) -> bool:
        return self.medium is Medium.DEVICE

    @property
    def is_file(self) -> bool:
        return self.medium is Medium.FILES

    def in_place(self, *, gpu: bool) -> bool:
        """Whether the model computes with the bytes where they are, on a GPU or on the CPU."""
        return self.on_device if gpu else not self.is_file

    @property
    def faster(self) -> tuple[Tier, ...]:
        """The tiers before this one, fastest first."""
        return tuple(TIERS[: TIERS.index(self)])

    @property
    def slower(self) -> tuple[Tier, ...]:
        """The tiers after this one."""
        return tuple(TIERS[TIERS.index(self) + 1 :])

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __reduce__(self) -> tuple[Callable[[str], Tier], tuple[str]]:
        return Tier.named, (self.name,)  # a copy is the tier itself


TIERS: list[Tier] = []  # all that are registered, fastest first


def register(tier: Tier, *, after: Tier | None = None) -> Tier:
    """Make a tier known, as the next slower one after `after`, by default as the slowest.

    Raises ValueError for a name that is taken or that a configuration cannot have, and for a
    further tier that is not host memory of a known capacity: there is one device, and one tier of
    swap files.
    """
    if not tier.name.isidentifier() or tier.name in ("auto", "gpu"):
        raise ValueError(f"{tier.name!r} cannot be a tier's name in a configuration")
    if any(each.name == tier.name for each in TIERS):
        raise ValueError(f"a tier named {tier.name} is registered already")
    is_further = any(each.medium is tier.medium for each in TIERS)
    if is_further and not (tier.medium is Medium.HOST and tier.capacity_nbytes > 0):
        raise ValueError(f"{tier.name}: a further tier has to be host memory with a capacity")
    TIERS.insert(len(TIERS) if after is None else TIERS.index(after) + 1, tier)
    return tier


Tier.DEVICE = register(Tier(name="device", title="GPU memory", medium=Medium.DEVICE))
Tier.HOST = register(Tier(name="host", title="RAM", medium=Medium.HOST))
Tier.NVME = register(Tier(name="nvme", title="disk", medium=Medium.FILES))


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
