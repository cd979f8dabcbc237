"""One thing to be judged: a model, a configuration, a step's input, hardware; and the verdict."""

from __future__ import annotations

from dataclasses import dataclass

from offload.config import OffloadConfig
from offload.planning.activation_facts import ActivationFacts
from offload.planning.estimate import MemoryEstimate, Shortfall, StepEstimate
from offload.planning.plan import Plan
from offload.planning.speeds import Speeds
from offload.planning.workload import Workload
from offload.tools.memest.profiles import HardwareProfile
from offload.tools.memest.source import ModelSource


@dataclass(frozen=True)
class Case:
    """All that an answer depends on. `speeds` are one rank's; None where they are not known."""

    source: ModelSource
    config: OffloadConfig
    workload: Workload
    profile: HardwareProfile
    speeds: Speeds | None


@dataclass(frozen=True)
class Verdict:
    """What was found of a case."""

    config: OffloadConfig  # resolved
    plan: Plan
    memory: MemoryEstimate
    step: StepEstimate | None
    shortfalls: tuple[Shortfall, ...]
    facts: ActivationFacts
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.shortfalls
