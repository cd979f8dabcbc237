"""The plan of a run: the first of the solver's candidates that the machine physically holds.

The solver counts the least memory that a plan needs. Heap holes, and copies that fill a budget,
come on top, and a slower candidate may keep fewer activations. Therefore the peaks of the
candidates are predicted in the solver's order (`step/memory`), and the first candidate whose peaks
fit everywhere is taken. `offload train`, `offload plan` and memest all choose this way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offload.planning.activations.facts import NOTHING
from offload.planning.choice.solver import Candidate, RunFacts, Solution, solve
from offload.planning.plan.estimate import MemoryClass, MemoryEstimate, Shortfall, Workload
from offload.planning.plan.plan import Hardware, Plan
from offload.planning.step.memory import PlannedMemory
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.tiers.units import in_one_unit
from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig


@dataclass(frozen=True)
class RunPlan:
    """The chosen candidate (`solution.best`) of a run, and its shortfalls."""

    asked: OffloadConfig  # as it was given: what is open there may be placed anew
    model: ModelShape
    hardware: Hardware
    run: RunFacts
    solution: Solution  # its best is the first that fits; the solver's first where none does
    memory: MemoryEstimate  # peaks against what one rank has of each place
    shortfalls: tuple[Shortfall, ...]

    @property
    def best(self) -> Candidate:
        return self.solution.best


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
        short = _shortfalls(memory, candidate, config, run.workload)
        others = tuple(other for other in candidates if other is not candidate)
        found = RunPlan(
            config, model, hardware, run, replace(solution, best=candidate, others=others), memory,
            short,
        )  # fmt: skip
        if not short:
            return found
        first = first or found
    assert first is not None  # a solution has a best candidate
    return first


def _shortfalls(
    memory: MemoryEstimate, best: Candidate, asked: OffloadConfig, workload: Workload
) -> tuple[Shortfall, ...]:
    """The shortfalls of the plan and of the places that hold it. An open budget is only what the
    machine leaves, so it is reported only if nothing else is short of that place."""

    def is_opened(each: Shortfall) -> bool:
        budget = best.plan.budgets[each.tier]
        opened = asked.budget.of(each.tier) is None and each.capacity_nbytes == budget
        return opened and each.key == f"budget.{each.tier}"

    named = [each for each in best.shortfalls if not is_opened(each)]
    named += _physical(memory, best, workload, {each.tier for each in named})
    said = {each.tier for each in named}
    opened = [
        each if best.plan.budgets[each.tier] else replace(each, message=each.message + _NONE_LEFT)
        for each in best.shortfalls
        if is_opened(each) and each.tier not in said
    ]
    return (*opened, *named)


_NONE_LEFT = "; libraries and activations leave nothing for it"


def _physical(
    memory: MemoryEstimate, best: Candidate, workload: Workload, said: Collection[Tier]
) -> Iterator[Shortfall]:
    """Shortfalls of places that overflow, but for those that are `said` already."""
    for tier, place in memory.places.items():
        if place.peak_nbytes <= place.capacity_nbytes or tier in said:
            continue
        largest = max(place.by_class, key=lambda name: place.by_class[name])
        over = place.peak_nbytes - place.capacity_nbytes
        peak, there, more, most = in_one_unit(
            place.peak_nbytes, place.capacity_nbytes, over, place.by_class[largest]
        )
        yield Shortfall(
            tier, place.peak_nbytes, place.capacity_nbytes, _key_of(largest, tier, best.plan),
            f"{tier.title}: the peak of {peak} is {more} more than the {there} there are; most "
            f"of it is {largest} ({most}): {remedy(largest, tier, best, workload)}",
        )  # fmt: skip


_CLASSES = {
    MemoryClass.PARAMETERS: StateClass.PARAMETERS,
    MemoryClass.MASTER: StateClass.OPTIMIZER,
    MemoryClass.GRADIENTS: StateClass.GRADIENTS,
    MemoryClass.OPTIMIZER: StateClass.OPTIMIZER,
}


def remedy(name: MemoryClass, tier: Tier, best: Candidate, workload: Workload) -> str:
    """Return a remedy for the largest class of a place that is not applied yet."""
    if name is MemoryClass.ACTIVATIONS:
        fewer = "a smaller batch" if workload.batch > 1 else "a shorter sequence"
        recomputed = best.config.placement.activations.checkpoint is True or not best.plan.trains
        return fewer if recomputed else f"set placement.activations.checkpoint: true, or {fewer}"
    if name is MemoryClass.CACHE:
        return "fewer or shorter sequences"
    if name is MemoryClass.FRAMEWORK:
        return "nothing to be done about it here"
    if name not in _CLASSES:
        return f"lower budget.{tier}"
    key = _key_of(name, tier, best.plan)
    if tier is Tier.NVME:
        return "only more disk helps"
    if tier is Tier.DEVICE and best.plan.gpu:
        return f"set {key}: host"
    if best.plan.budgets[Tier.NVME]:
        return f"set {key}: nvme"
    return "only more of it helps, or disk: budget.nvme is 0 B"


def _key_of(name: MemoryClass, tier: Tier, plan: Plan) -> str:
    if name is MemoryClass.ACTIVATIONS:
        return "placement.activations.checkpoint"
    if name not in _CLASSES:
        return f"budget.{tier}"
    return f"placement.{_CLASSES[name]}"
