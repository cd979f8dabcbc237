"""The bytes that a plan lacks in a tier or on the machine, each with a remedy."""

from collections.abc import Iterator, Mapping

from offload.planning.plan.estimate import Shortfall
from offload.planning.plan.plan import (
    Hardware,
    Plan,
    ahead_nbytes,
    breakdown,
    needed_nbytes,
    ram_nbytes,
)
from offload.tiers.ledger import StateClass
from offload.tiers.tier import TIERS, Medium, Tier
from offload.tiers.units import format_bytes, in_one_unit

SMALLER_PASS = (
    "make the pass smaller: a smaller batch, shorter sequences, in training also "
    "placement.activations.checkpoint: true, or, for causal language models of transformers, "
    "loss.chunked: true"
)


def shortfalls(
    plan: Plan, hardware: Hardware, beside: Mapping[str, int] | None = None
) -> tuple[Shortfall, ...]:
    """The shortfalls of all tiers that cannot hold their part, budgets first; empty if all can.
    `beside` names what takes GPU memory beside the device tier."""
    gpu = tuple(_of_gpu(plan, hardware.device_nbytes, beside)) if beside else ()
    of_budgets = (each for each in _of_budgets(plan) if each.tier not in {g.tier for g in gpu})
    return (*gpu, *of_budgets, *_of_machine(plan, hardware))


def _of_gpu(plan: Plan, there: int, beside: Mapping[str, int]) -> Iterator[Shortfall]:
    least = needed_nbytes(plan, Tier.DEVICE)
    parts = {"copies": max(0, plan.budgets[Tier.DEVICE] - least), **beside}
    needed = least + sum(parts.values())
    if plan.gpu_budget_nbytes is None or needed <= there:
        return
    free = "" if there == plan.gpu_budget_nbytes else " that are free of it"
    terms = (f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items() if nbytes)
    total, limit, short = in_one_unit(needed, there, needed - there)
    yield Shortfall(
        Tier.DEVICE, needed, there, "budget.gpu",
        f"budget.gpu: {limit}{free} is {short} short of the {total} needed "
        f"({breakdown(plan, Tier.DEVICE)} + {' + '.join(terms)}); raise budget.gpu, or "
        f"{SMALLER_PASS if beside['pass'] else 'set a lower budget.device: the pass has the rest'}",
    )  # fmt: skip


def lacking_nbytes(plan: Plan, tier: Tier, hardware: Hardware, beside_nbytes: int) -> int:
    """The bytes that a tier lacks of its budget (including reads ahead) or of the machine, with
    `beside_nbytes` of the same memory in use beside the tiers; negative if there is room."""
    needed = needed_nbytes(plan, tier)
    lacking = needed + ahead_nbytes(plan, tier) - plan.room_nbytes(tier)
    if tier is Tier.NVME:
        lacking = max(lacking, needed - hardware.nvme_free_nbytes)
        return max(1, lacking) if _leaves_none_to_activations(plan) else lacking
    if plan.gpu and tier is Tier.DEVICE:  # taken in one piece
        return max(lacking, plan.budgets[tier] + beside_nbytes - hardware.device_nbytes)
    if tier.capacity_nbytes:
        return max(lacking, needed - tier.capacity_nbytes)
    return max(lacking, ram_nbytes(plan) + beside_nbytes - hardware.host_nbytes)


def _leaves_none_to_activations(plan: Plan) -> bool:
    """Whether activations have their home on nvme and the other states leave nothing of it."""
    at = plan.activations
    return at is not None and at.tier is Tier.NVME and not at.disk_nbytes


def _of_budgets(plan: Plan) -> Iterator[Shortfall]:
    for tier in TIERS:
        needed = needed_nbytes(plan, tier)
        budget = plan.budgets[tier]
        if needed > budget:
            all_of_it, there, short = in_one_unit(needed, budget, needed - budget)
            yield Shortfall(
                tier, needed, budget, f"budget.{tier}",
                f"budget.{tier}: {there} is {short} short of the {all_of_it} needed "
                f"({breakdown(plan, tier)}); "
                f"{_remedy(plan, tier, needed - budget)}",
            )  # fmt: skip
        elif tier is Tier.NVME and _leaves_none_to_activations(plan):
            yield Shortfall(
                tier, needed + 1, budget, "placement.activations.tier",
                "placement.activations.tier: nvme, but the other states need all of budget.nvme "
                f"({format_bytes(budget - needed)} are left); raise budget.nvme",
            )  # fmt: skip


def _of_machine(plan: Plan, hardware: Hardware) -> Iterator[Shortfall]:
    checks = [
        (tier, plan.budgets[tier], hardware.capacities[tier],
         f"budget.{tier}: {{}} is more than the {{}} of {tier.title} that this process may use; "
         "lower it, or write a percentage")
        for tier in TIERS if tier.medium is Medium.HOST
    ]  # fmt: skip
    checks += [
        (Tier.HOST, ram_nbytes(plan), hardware.host_nbytes,
         "budget.host: the plan needs {} of RAM, this process may use {}; "
         + _to_disk(plan, hardware)),
        (Tier.NVME, needed_nbytes(plan, Tier.NVME), hardware.nvme_free_nbytes,
         "budget.nvme: the plan needs {} on disk, {} are free under nvme.paths; free space, or add "
         "a path to nvme.paths"),
    ]  # fmt: skip
    for tier, needed, there, text in checks:
        if needed > there:
            message = text.format(*in_one_unit(needed, there))
            yield Shortfall(tier, needed, there, f"budget.{tier}", message)


def _to_disk(plan: Plan, hardware: Hardware) -> str:
    if not hardware.nvme_free_nbytes:
        return "there is no disk to move a class to"
    if not plan.budgets[Tier.NVME]:
        return "raise budget.nvme (0 B), and move a class to nvme"
    return "move a class to nvme"


def _remedy(plan: Plan, tier: Tier, short_nbytes: int) -> str:
    """Suggest a larger budget, and another change."""
    raised = f"raise budget.{tier}"
    if plan.expected[tier].get(StateClass.KV, 0) > short_nbytes:
        fewer = plan.kv is not None and plan.kv.tokens > 1
        return f"{raised}, {'or lower kv.tokens' if fewer else 'or remove placement.kv'}"
    if not tier.slower:
        return raised
    below = tier.slower[0]
    if sum(homes.get(tier, 0) for homes in plan.homes.values()) > short_nbytes:
        if below is not Tier.HOST and not plan.budgets[below]:
            return f"{raised} or budget.{below} (0 B)"
        return f"{raised}, or move a class of states to {below} (placement)"
    if plan.expected[tier].get(StateClass.STAGING, 0) > short_nbytes:
        ranks = ", or train on fewer ranks" if plan.shared is not None else ""
        return f"{raised}, or lower optimizer.chunk{ranks}"
    return raised
