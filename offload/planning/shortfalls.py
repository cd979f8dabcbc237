"""What a plan asks of a tier or of the machine beyond what is there, each with what to do."""

from __future__ import annotations

from collections.abc import Iterator

from offload.planning.estimate import Shortfall
from offload.planning.plan import Hardware, Plan, breakdown, needed_nbytes
from offload.planning.plan_sizes import CLASSES
from offload.tiers.extent import TierName
from offload.tiers.ledger import StateClass
from offload.tiers.units import format_bytes


def shortfalls(plan: Plan, hardware: Hardware) -> tuple[Shortfall, ...]:
    """Every tier that cannot hold its part, budgets first; empty for a plan that can run."""
    return (*_of_budgets(plan), *_of_machine(plan, hardware))


def _of_budgets(plan: Plan) -> Iterator[Shortfall]:
    for tier in (TierName.DEVICE, TierName.HOST, TierName.NVME):
        needed = needed_nbytes(plan, tier)
        budget = plan.budgets[tier]
        if needed > budget:
            yield Shortfall(
                tier, needed, budget, f"budget.{tier}",
                f"budget.{tier}: {format_bytes(budget)} is {format_bytes(needed - budget)} short "
                f"of the {format_bytes(needed)} needed ({breakdown(plan, tier)}); "
                f"{_remedy(plan, tier, needed - budget)}",
            )  # fmt: skip
        elif tier is TierName.NVME:
            yield from _of_activations(plan)


def _of_activations(plan: Plan) -> Iterator[Shortfall]:
    """nvme is their home, and the other states leave nothing of it."""
    activations = plan.activations
    if activations is None or activations.tier is not TierName.NVME or activations.disk_nbytes:
        return
    needed, budget = needed_nbytes(plan, TierName.NVME), plan.budgets[TierName.NVME]
    yield Shortfall(
        TierName.NVME, needed + 1, budget, "placement.activations.tier",
        "placement.activations.tier: nvme, but the other states need all of budget.nvme "
        f"({format_bytes(budget - needed)} are left); raise budget.nvme",
    )  # fmt: skip


def _of_machine(plan: Plan, hardware: Hardware) -> Iterator[Shortfall]:
    room = hardware.host_nbytes
    if plan.budgets[TierName.HOST] > room:
        yield Shortfall(
            TierName.HOST, plan.budgets[TierName.HOST], room, "budget.host",
            f"budget.host: {format_bytes(plan.budgets[TierName.HOST])} is more than the "
            f"{format_bytes(room)} of RAM that this process may use; lower it, or write a "
            "percentage",
        )  # fmt: skip
    memory = needed_nbytes(plan, TierName.HOST)
    if not hardware.device_nbytes:
        memory += needed_nbytes(plan, TierName.DEVICE)
    if memory > room:
        yield Shortfall(
            TierName.HOST, memory, room, "budget.host",
            f"budget.host: the plan needs {format_bytes(memory)} of RAM, this process may use "
            f"{format_bytes(room)}; {_to_disk(plan, hardware)}",
        )  # fmt: skip
    disk = needed_nbytes(plan, TierName.NVME)
    if disk > hardware.nvme_free_nbytes:
        yield Shortfall(
            TierName.NVME, disk, hardware.nvme_free_nbytes, "budget.nvme",
            f"budget.nvme: the plan needs {format_bytes(disk)} on disk, "
            f"{format_bytes(hardware.nvme_free_nbytes)} are free under nvme.paths; free space, or "
            "add a path to nvme.paths",
        )  # fmt: skip


def _to_disk(plan: Plan, hardware: Hardware) -> str:
    if not hardware.nvme_free_nbytes:
        return "there is no disk to move a class to"
    if not plan.budgets[TierName.NVME]:
        return "raise budget.nvme (0 B), and move a class to nvme"
    return "move a class to nvme"


def _remedy(plan: Plan, tier: TierName, short_nbytes: int) -> str:
    if tier is TierName.NVME:
        return "raise budget.nvme"
    classes = [c for c in CLASSES if plan.expected[tier].get(c)]
    below = TierName.HOST if tier is TierName.DEVICE else TierName.NVME
    if not classes:
        smaller = plan.expected[tier].get(StateClass.STAGING, 0) > short_nbytes
        return f"raise budget.{tier}" + (", or lower optimizer.chunk" if smaller else "")
    if below is TierName.NVME and not plan.budgets[below]:
        return f"raise budget.{tier} or budget.nvme (0 B)"
    largest = max(classes, key=lambda c: plan.expected[tier][c])
    return f"raise budget.{tier}, or set placement.{largest}: {below}"
