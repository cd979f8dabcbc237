"""The plan of a run: the first of the solver's candidates that the machine physically holds.

The solver counts the least memory that a plan needs. Heap holes, and copies that fill a budget,
come on top, and a slower candidate may keep fewer activations. Therefore the peaks of the
candidates are predicted in the solver's order (`step/memory`), and the first candidate whose peaks
fit everywhere is taken. `offload train`, `offload plan` and memest all choose this way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offload.planning.activations.facts import NOTHING
from offload.planning.choice.solver import Candidate, RunFacts, Solution, solve
from offload.planning.plan.estimate import MemoryEstimate
from offload.planning.plan.plan import Hardware
from offload.planning.step.memory import PlannedMemory
from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig


@dataclass(frozen=True)
class RunPlan:
    """The chosen candidate (`solution.best`) of a run."""

    asked: OffloadConfig  # as it was given: what is open there may be placed anew
    model: ModelShape
    hardware: Hardware
    run: RunFacts
    solution: Solution  # its best is the first that fits; the solver's first where none does
    memory: MemoryEstimate  # peaks against what one rank has of each place

    @property
    def best(self) -> Candidate:
        return self.solution.best

    @property
    def fits(self) -> bool:
        places = self.memory.places.values()
        overflow = any(place.peak_nbytes > place.capacity_nbytes for place in places)
        return not (self.best.shortfalls or overflow)


def plan_run(
    config: OffloadConfig, model: ModelShape, hardware: Hardware, run: RunFacts, *,
    traced: bool = True,
) -> RunPlan:  # fmt: skip
    """Choose the plan of `config`, whether or not it fits. `traced`: `run` knows the cost of a
    pass; otherwise only states and libraries are counted."""
    solution = solve(config, model, hardware, run if traced else None)
    candidates = (solution.best, *solution.others)
    first = None
    for candidate in candidates:
        if first is not None and not candidate.fits:
            break
        facts = run.facts_of(candidate.config) if traced else NOTHING
        planned = PlannedMemory(
            candidate.plan, candidate.config, model, facts, run.workload, run.baseline
        )
        memory = planned.estimate(hardware.capacities)
        others = tuple(other for other in candidates if other is not candidate)
        found = RunPlan(
            config, model, hardware, run, replace(solution, best=candidate, others=others), memory
        )
        if found.fits:
            return found
        first = first or found
    assert first is not None  # a solution has a best candidate
    return first
