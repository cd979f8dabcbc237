"""The estimate that memest shows: memory, speed and useful changes, as plain numbers.

Sizes are in bytes and times in seconds. How a figure is found or shown is not known here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from offload.config import OffloadConfig
from offload.planning.plan.estimate import MemoryEstimate, Shortfall, StepEstimate, Workload
from offload.planning.plan.plan import Plan
from offload.tools.memest.generation import Generation
from offload.zero.groups.model_shape import ModelShape

_SLOW_TOKENS_PER_S = 1_000_000 / 86_400  # a million tokens take more than a day
_FEW_STEPS = 10_000  # of a drive's whole life: a few runs wear it out


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
    checkpoint_nbytes: int  # on disk, of one saved checkpoint
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


def active_numel(model: ModelShape) -> int:
    """The parameters that compute one token: of the experts, on all ranks, only the chosen ones."""
    chosen = model.experts_per_token
    idle = 0
    for table in model.tables.values():
        ep_size = model.groups[table[0]].ep_size  # over how many ranks its experts are spread
        experts = len(table) * ep_size
        if chosen is not None and chosen < experts:
            numel = ep_size * sum(model.groups[index].numel for index in table)
            idle += numel * (experts - chosen) // experts
    return model.numel_of_all_ranks - idle
