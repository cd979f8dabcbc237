"""Makes plans from budgets: the tier of each class of state, and whether it can hold its part.

A run whose work is known gets the first of the solver's candidates that the machine physically
holds (`plan_run`). The solver counts the least memory that a plan needs. Heap holes, and copies
that fill a budget, come on top, and a slower candidate may keep fewer activations. Therefore the
peaks of the candidates are predicted in the solver's order (`step/memory`). `initialize`,
`offload train` and memest all choose this way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offload.planning.activations.facts import NOTHING
from offload.planning.choice.solver import Candidate, RunFacts, Solution, solve
from offload.planning.plan.builder import within_gpu_budget
from offload.planning.plan.estimate import MemoryEstimate
from offload.planning.plan.plan import Hardware, Plan
from offload.planning.step.memory import PlannedMemory
from offload.tiers.errors import BudgetError
from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig


def chosen_config(config: OffloadConfig, plan: Plan) -> OffloadConfig:
    """Return `config` with the plan's placement, chunk and prefetch as explicit values, and with
    its budgets, since the free memory may change."""
    homes = {str(name): placement for name, placement in plan.placements.items()}
    budgets = {str(tier): nbytes for tier, nbytes in plan.budgets.items()}
    if plan.gpu_budget_nbytes is not None:
        budgets["gpu"] = plan.gpu_budget_nbytes
    update = {
        "budget": config.budget.model_copy(update=budgets),
        "placement": config.placement.model_copy(update=homes),
        "prefetch": plan.prefetch,
        "optimizer": config.optimizer.model_copy(update={"chunk": plan.chunk_numel}),
    }
    return config.model_copy(update=update)


def resolved_config(config: OffloadConfig, plan: Plan, device: str) -> OffloadConfig:
    """Return `config` with every `auto` that the machine and the model decide filled in."""
    return chosen_config(config.resolved(), plan).model_copy(update={"device": device})


def make_plan(config: OffloadConfig, model: ModelShape, hardware: Hardware) -> Plan:
    """Make the plan of a model on some hardware. Raise BudgetError if a budget cannot work."""
    best = solve(config, model, hardware).best
    check_plan(best)
    return best.plan


def check_plan(best: Candidate) -> None:
    """Raise BudgetError, naming the missing bytes and the key, if a tier cannot hold its part."""
    if best.shortfalls:
        raise BudgetError(best.shortfalls[0].message)


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
    hardware = within_gpu_budget(config, hardware)
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
        run_plan = RunPlan(
            config, model, hardware, run, replace(solution, best=candidate, others=others), memory
        )
        if run_plan.fits:
            return run_plan
        first = first or run_plan
    assert first is not None  # a solution has a best candidate
    return first
