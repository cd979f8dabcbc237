"""The work of a step, and estimates of its memory and speed, as plain numbers.

Sizes are in bytes and times in seconds. How a figure is found or shown is not known here.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from offload.tiers.tier import Medium, Tier


@dataclass(frozen=True, slots=True)
class Workload:
    """The input of one step of one rank."""

    batch: int  # sequences per backward pass
    sequence: int  # tokens per sequence
    passes: int = 1  # backward passes per step

    @property
    def tokens(self) -> int:
        """The tokens per step."""
        return self.batch * self.sequence * self.passes


class MemoryClass(enum.StrEnum):
    """The classes of bytes in a place, in the order in which they are stacked."""

    PARAMETERS = "parameters"
    MASTER = "master"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    CACHE = "kv cache"  # keys and values of the tokens that a model has seen
    STAGING = "staging"  # buffers in transit, and copies of what lives elsewhere
    FRAGMENTATION = "fragmentation"  # padding to pages and blocks, holes between what is held
    FRAMEWORK = "framework"  # interpreter, libraries, contexts, compiled kernels


@dataclass(frozen=True)
class PlaceEstimate:
    """One physical place: GPU memory, RAM, or disk."""

    capacity_nbytes: int  # what may be used of it
    by_class: Mapping[MemoryClass, int]  # at the moment of the peak

    @property
    def peak_nbytes(self) -> int:
        return sum(self.by_class.values())


@dataclass(frozen=True)
class MemoryEstimate:
    """The peaks of a run. A CPU-only machine has no place `device`: its tier is part of RAM."""

    places: Mapping[Tier, PlaceEstimate]
    ledger_peaks: Mapping[Tier, int]  # what the ledger of each tier will have reached
    # Of these the ledger's peak depends on the moment (how far moves are behind), and what is
    # predicted is the most that it can be. Of the others it is exact for one rank; of several,
    # collectives have their buffers for as long as they take.
    bounds: frozenset[Tier] = frozenset()


@dataclass(frozen=True, slots=True)
class LinkTime:
    """One resource that a step keeps busy: `compute`, `optimizer`, `nvme read`, `nvme write`,
    `host to device`, `device to host`."""

    name: str
    seconds: float
    nbytes: int = 0  # that cross it


@dataclass(frozen=True)
class StepEstimate:
    """One optimizer step of a long run, including all deferred work."""

    seconds: float
    links: tuple[LinkTime, ...]
    bottleneck: str  # the link that bounds the step
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def written_nbytes(self) -> int:
        """The bytes written to nvme per step."""
        return sum(link.nbytes for link in self.links if link.name == "nvme write")


# How bad a missing byte is, by place: what more of it costs, roughly, as a GPU, as RAM and as SSD.
# Of plans that do not fit, that is the best which is short of what is the easiest to get.
_SHORT_WEIGHTS = {Medium.DEVICE: 1000, Medium.HOST: 50, Medium.FILES: 1}


def short_weight(tier: Tier, *, gpu: bool) -> int:
    """The weight of a missing byte; without a GPU the device's memory is RAM."""
    return _SHORT_WEIGHTS[tier.medium if gpu or tier.is_file else Medium.HOST]


@dataclass(frozen=True)
class Shortfall:
    """A place that cannot hold what a plan needs there."""

    tier: Tier
    needed_nbytes: int
    capacity_nbytes: int
    key: str  # the setting that says so, `budget.host`
    message: str  # what, how much, what to do
