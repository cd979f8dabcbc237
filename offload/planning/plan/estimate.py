"""An estimate of memory, speed and useful changes, as plain numbers.

Sizes are in bytes and times in seconds. How a figure is found or shown is not known here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from offload.config import OffloadConfig
from offload.planning.plan.plan import Plan
from offload.planning.plan.workload import Generation, Workload
from offload.tiers.tier import Medium, Tier


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
    checkpoint_nbytes: int  # on disk, of one saved checkpoint
    # Of these the ledger's peak depends on the moment (how far moves are behind), and what is
    # predicted is the most that it can be; of the others it is exact.
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


_SLOW_TOKENS_PER_S = 1_000_000 / 86_400  # a million tokens take more than a day
_FEW_STEPS = 10_000  # of a drive's whole life: a few runs wear it out

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


@dataclass(frozen=True)
class Change:
    """Settings with which it would fit, and their effect on the step time."""

    settings: Mapping[str, str]  # dotted key -> value, as `-o key=value` takes them
    text: str
    # of the predicted step time now (or of the next best); of the time per token where a step has
    step_factor: float | None = None  # ... other tokens


@dataclass(frozen=True)
class InferenceEstimate:
    """Text generation: the pass over the prompts, then one pass per token (`Estimate.step`)."""

    generation: Generation
    prefill: StepEstimate | None  # None where nothing is known of speeds
    cache_nbytes: int | None  # of all sequences, in the end; None: it is not known what is cached
    token_nbytes: int | None  # that one more token of one sequence adds

    def seconds(self, decode: StepEstimate) -> float | None:
        """The seconds of the whole generation; None if those of the prefill are not known."""
        if self.prefill is None:
            return None
        return self.prefill.seconds + (self.generation.new_tokens - 1) * decode.seconds


@dataclass(frozen=True)
class Estimate:
    """The estimate that `memest` prints for one model, configuration and machine."""

    model: str
    numel: int
    numel_trainable: int
    hardware: str
    workload: Workload
    config: OffloadConfig  # resolved
    plan: Plan
    memory: MemoryEstimate
    step: StepEstimate | None  # None where nothing is known of speeds
    shortfalls: tuple[Shortfall, ...] = ()
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)  # what was assumed
    active_numel: int | None = None  # that compute one token; None: the model has no experts
    inference: InferenceEstimate | None = None  # `step` is then a pass of one token per sequence
    system_nbytes: int = 0  # of a rank's RAM, kept for the system and in no capacity
    endurance_nbytes: int = 0  # that the SSDs are rated to take in writes; 0: unknown

    @property
    def fits(self) -> bool:
        return not self.shortfalls

    @property
    def ssd_life_steps(self) -> int | None:
        """The steps after which the SSDs reach their rated writes; None if nothing is written or
        the rating is not known."""
        written = self.step.written_nbytes if self.step is not None else 0
        return self.endurance_nbytes // written if written and self.endurance_nbytes else None

    @property
    def is_slow(self) -> bool:
        """Whether training is too slow to be useful."""
        trains = self.step is not None and self.inference is None
        return trains and self.step.tokens_per_s < _SLOW_TOKENS_PER_S  # type: ignore[union-attr]

    @property
    def wears_out_ssds(self) -> bool:
        """Whether the SSDs' rated writes last for only a few runs."""
        life = self.ssd_life_steps
        return self.inference is None and life is not None and life < _FEW_STEPS
