"""The judgement on a case: the best plan, its peaks by place, its step, and what is short."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

from offload.config import OffloadConfig
from offload.planning.activations.facts import ActivationFacts, HeapFacts, PassCost
from offload.planning.choice.planner import resolved_config
from offload.planning.choice.solver import Candidate, RunFacts, Solution, solve
from offload.planning.machine.baseline import Baseline, known_baseline
from offload.planning.machine.speeds import NOMINAL
from offload.planning.plan.estimate import (
    Change,
    Estimate,
    MemoryClass,
    MemoryEstimate,
    PlaceEstimate,
    Shortfall,
)
from offload.planning.plan.plan import Hardware
from offload.planning.plan.workload import Workload
from offload.planning.step.memory import PlannedMemory
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.estimate.case import Case

Facts = TypeVar("Facts", ActivationFacts, HeapFacts, PassCost)
_NOTHING = ActivationFacts(0, 0, 0, "", PassCost(0, 0, 0), PassCost(0, 0, 0))


@dataclass
class Judge:
    """Judges cases of one model; what a pass takes is found once per kind of pass."""

    _facts: dict[object, dict[int, ActivationFacts]] = field(default_factory=dict)

    def __call__(self, case: Case) -> Estimate:
        """The best plan that the configuration allows, whether or not it fits."""
        baseline = _baseline_of(case)
        best, memory, short = self._best(case, baseline)
        step = best.step if case.timed else None
        if step is not None:
            step = replace(step, tokens=step.tokens * case.profile.ranks)
        return Estimate(
            model=case.source.name,
            numel=case.source.shape.numel,
            numel_trainable=case.source.shape.numel_trainable,
            hardware=case.profile.text,
            workload=case.workload,
            config=resolved_config(best.config, best.plan, "cuda" if best.plan.gpu else "cpu"),
            plan=best.plan,
            memory=memory,
            step=step,
            shortfalls=short,
            notes=(baseline.note,),
            system_nbytes=case.profile.system_nbytes // case.profile.ranks_per_node,
            endurance_nbytes=case.speeds.endurance_nbytes if case.speeds is not None else 0,
        )

    def fits(self, case: Case) -> bool:
        """Whether any plan does. Takes a fraction of the time of an estimate."""
        baseline = _baseline_of(case)
        return not self._best(case, baseline, any_fit=True)[2]

    def facts(self, case: Case, config: OffloadConfig) -> ActivationFacts:
        """What one pass takes under `config`; nothing where the model's code is not known.

        Found for one batch; at others it is taken to grow with the batch (of the built-in models
        to 0.03 %).
        """
        source, workload = case.source, case.workload
        if not source.has_graph:
            return _NOTHING
        device = "cuda" if case.profile.gpu_nbytes else "cpu"
        key = (
            source.fingerprint, config.precision, config.placement.activations.checkpoint,
            config.micro_batches, workload.sequence, device,
        )  # fmt: skip
        by_batch = self._facts.setdefault(key, {})
        if by_batch and workload.batch not in by_batch:
            batch, facts = next(iter(by_batch.items()))
            by_batch[workload.batch] = scaled(facts, workload.batch / batch)
        if not by_batch:
            by_batch[workload.batch] = source.activations(config, workload, device)
        return by_batch[workload.batch]

    def advice(self, case: Case) -> tuple[Change, ...]:
        """What would make a step faster; nothing where nothing is known of time."""
        if not case.timed:
            return ()
        from offload.planning.choice.advice import Situation, advise

        baseline = _baseline_of(case)
        best = self._solve(case, baseline).best
        known = self._known(case, baseline, any_fit=False)
        hardware = case.hardware
        return tuple(advise(Situation(case.config, case.source.shape, hardware, known, best)))

    def _best(
        self, case: Case, baseline: Baseline, *, any_fit: bool = False
    ) -> tuple[Candidate, MemoryEstimate, tuple[Shortfall, ...]]:
        """The first of the solver's candidates that every place holds, else the first of all.

        The solver counts what a plan needs at least; holes and copies that fill a budget come on
        top, and a slower candidate may keep fewer activations.
        """
        solution = self._solve(case, baseline, any_fit=any_fit)
        first = None
        for candidate in (solution.best, *solution.others):
            if first is not None and not candidate.fits:
                break
            plan, config = candidate.plan, candidate.config
            facts = self.facts(case, config)
            planned = PlannedMemory(plan, config, case.source.shape, facts, case.workload, baseline)
            memory = _with_capacities(planned.estimate(), case.hardware)
            short = (
                *_reported(candidate, case.config), *_physical(memory, candidate, case.workload)
            )  # fmt: skip
            if not short:
                return candidate, memory, short
            first = first or (candidate, memory, short)
        assert first is not None  # a solution has a best candidate
        return first

    def _solve(self, case: Case, baseline: Baseline, *, any_fit: bool = False) -> Solution:
        known = self._known(case, baseline, any_fit=any_fit) if case.source.has_graph else None
        return solve(case.config, case.source.shape, case.hardware, known)

    def _known(self, case: Case, baseline: Baseline, *, any_fit: bool) -> RunFacts:
        return RunFacts(
            case.workload, case.speeds or NOMINAL, lambda config: self.facts(case, config),
            baseline.ram_nbytes, baseline.gpu_nbytes,
            baseline.more_nbytes, any_fit,
        )  # fmt: skip


def _baseline_of(case: Case) -> Baseline:
    gpu = case.profile.gpu_free_nbytes > 0
    return known_baseline(case.config.precision, gpu=gpu)


def scaled(facts: Facts, factor: float) -> Facts:
    """What a pass takes with `factor` as many sequences: as many operations, on more."""
    values: dict[str, Any] = {}
    for each in fields(facts):
        value = getattr(facts, each.name)
        if is_dataclass(value):
            values[each.name] = scaled(value, factor)  # type: ignore[type-var]
        elif isinstance(value, int) and each.name != "operations":
            values[each.name] = int(value * factor)
    return replace(facts, **values)


def _reported(best: Candidate, asked: OffloadConfig) -> Iterator[Shortfall]:
    """What the plan lacks. A budget that was left open is only what the machine leaves: it is
    named where nothing else is short of that place."""
    for index, each in enumerate(best.shortfalls):
        budget = best.plan.budgets[each.tier]
        opened = getattr(asked.budget, each.tier) is None
        if each.key != f"budget.{each.tier}" or not opened or each.capacity_nbytes != budget:
            yield each
        elif not any(other.tier is each.tier for other in best.shortfalls[index + 1 :]):
            yield replace(each, message=f"{each.message}{_NOTHING_LEFT if not budget else ''}")


_NOTHING_LEFT = "; libraries and activations leave nothing for it"


def _physical(memory: MemoryEstimate, best: Candidate, workload: Workload) -> Iterator[Shortfall]:
    """Places that overflow though every tier keeps its budget."""
    said = {shortfall.tier for shortfall in best.shortfalls}
    for tier, place in memory.places.items():
        if place.peak_nbytes <= place.capacity_nbytes or tier in said:
            continue
        largest = max(place.by_class, key=lambda name: place.by_class[name])
        yield Shortfall(
            tier, place.peak_nbytes, place.capacity_nbytes, _key_of(largest, tier),
            f"{_NAMES[tier]}: the peak of {format_bytes(place.peak_nbytes)} is "
            f"{format_bytes(place.peak_nbytes - place.capacity_nbytes)} more than the "
            f"{format_bytes(place.capacity_nbytes)} there are; most of it is {largest} "
            f"({format_bytes(place.by_class[largest])}): {remedy(largest, tier, best, workload)}",
        )  # fmt: skip


_NAMES = {Tier.DEVICE: "GPU memory", Tier.HOST: "RAM", Tier.NVME: "disk"}
_KEYS = {
    MemoryClass.PARAMETERS: "placement.parameters",
    MemoryClass.MASTER: "placement.optimizer",
    MemoryClass.GRADIENTS: "placement.gradients",
    MemoryClass.OPTIMIZER: "placement.optimizer",
    MemoryClass.ACTIVATIONS: "placement.activations.checkpoint",
}


def remedy(name: MemoryClass, tier: Tier, best: Candidate, workload: Workload) -> str:
    """What could be done about the largest part of a place, of what is not done already."""
    if name is MemoryClass.ACTIVATIONS:
        fewer = "a smaller batch" if workload.batch > 1 else "a shorter sequence"
        recomputed = best.config.placement.activations.checkpoint is True
        return fewer if recomputed else f"set placement.activations.checkpoint: true, or {fewer}"
    if name is MemoryClass.FRAMEWORK:
        return "nothing to be done about it here"
    if name not in _KEYS:
        return f"lower budget.{tier}"
    if tier is Tier.NVME:
        return "only more disk helps"
    if tier is Tier.DEVICE and best.plan.gpu:
        return f"set {_KEYS[name]}: host"
    if best.plan.budgets[Tier.NVME]:
        return f"set {_KEYS[name]}: nvme"
    return "only more of it helps, or disk: budget.nvme is 0 B"


def _key_of(name: MemoryClass, tier: Tier) -> str:
    return _KEYS.get(name, f"budget.{tier}")


def _with_capacities(memory: MemoryEstimate, hardware: Hardware) -> MemoryEstimate:
    """Every place against what one rank has of it.

    A tier that its budget cannot hold is predicted as full, the excess as a negative class: what
    would have to be held is shown instead.
    """
    there = {
        Tier.DEVICE: hardware.device_nbytes,
        Tier.HOST: hardware.host_nbytes,
        Tier.NVME: hardware.nvme_free_nbytes,
    }
    places = {
        tier: PlaceEstimate(there[tier], {name: n for name, n in place.by_class.items() if n > 0})
        for tier, place in memory.places.items()
    }
    return replace(memory, places=places)
