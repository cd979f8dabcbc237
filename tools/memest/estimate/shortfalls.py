"""The places that cannot hold a run, each with a remedy, and where the figures come from."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from offload.planning.choice.planner import RunPlan
from offload.planning.choice.solver import Candidate
from offload.planning.machine.baseline import GPU_CONTEXT_NBYTES, Baseline
from offload.planning.plan.estimate import MemoryClass, Shortfall, Workload
from offload.planning.plan.plan import Plan
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes, in_one_unit


def run_shortfalls(planned: RunPlan) -> tuple[Shortfall, ...]:
    """Return the shortfalls of the plan and of the places that hold it. An open budget is only what
    the machine leaves, so it is reported only if nothing else is short of that place."""
    best, asked = planned.best, planned.asked

    def is_opened(each: Shortfall) -> bool:
        budget = best.plan.budgets[each.tier]
        opened = asked.budget.of(each.tier) is None and each.capacity_nbytes == budget
        return opened and each.key == f"budget.{each.tier}"

    named = [each for each in best.shortfalls if not is_opened(each)]
    named += _physical(planned, {each.tier for each in named})
    said = {each.tier for each in named}
    opened = [
        each if best.plan.budgets[each.tier] else replace(each, message=each.message + _NONE_LEFT)
        for each in best.shortfalls
        if is_opened(each) and each.tier not in said
    ]
    return (*opened, *named)


_NONE_LEFT = "; libraries and activations leave nothing for it"


def _physical(planned: RunPlan, said: Collection[Tier]) -> Iterator[Shortfall]:
    """Yield shortfalls of places that overflow, but for those that are `said` already."""
    best, memory = planned.best, planned.memory
    for tier, place in memory.places.items():
        if place.peak_nbytes <= place.capacity_nbytes or tier in said:
            continue
        largest = max(place.by_class, key=lambda name: place.by_class[name])
        over = place.peak_nbytes - place.capacity_nbytes
        peak, there, more, share = in_one_unit(
            place.peak_nbytes, place.capacity_nbytes, over, place.by_class[largest]
        )
        yield Shortfall(
            tier, place.peak_nbytes, place.capacity_nbytes, _key_of(largest, tier, best.plan),
            f"{tier.title}: the peak of {peak} is {more} more than the {there} there are; most "
            f"of it is {largest} ({share}): {remedy(largest, tier, best, planned.run.workload)}",
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


def baseline_note(baseline: Baseline) -> str:
    """Return a sentence on the source of the figures."""
    ram = format_bytes(baseline.ram_nbytes)
    if baseline.gpu_nbytes:
        return (
            f"Python, PyTorch with CUDA and kernels are assumed to take {ram} of RAM; beside "
            f"budget.device and tensors, {format_bytes(baseline.gpu_nbytes)} of GPU memory are for "
            f"the context ({format_bytes(GPU_CONTEXT_NBYTES)}, as measured on an H100 with "
            f"torch 2.11) and cuBLAS's workspaces (Hopper's default)"
        )
    if baseline.measured:
        return f"Python, PyTorch and kernels take {ram} of RAM, as measured on this machine"
    return (
        f"Python, PyTorch and kernels take {ram} of RAM: a default, measured on another "
        "machine (2 cores, torch 2.13)"
    )
