"""Makes plans from budgets: the tier of each class of state, and whether it can hold its part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload.planning.choice.solver import solve
from offload.planning.plan.plan import Hardware, Plan
from offload.planning.plan.shortfalls import shortfalls
from offload.swap.threads.worker import available_cores
from offload.tiers.errors import BudgetError
from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig


def chosen_config(config: OffloadConfig, plan: Plan) -> OffloadConfig:
    """Return `config` with the plan's placement, chunk and prefetch as explicit values, and with
    its budgets, since the free memory may change."""
    homes = {str(name): placement for name, placement in plan.placements.items()}
    budgets = {str(tier): nbytes for tier, nbytes in plan.budgets.items()}
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


def update_threads(plan: Plan, ranks_here: int) -> int:
    """Return the number of threads for the CPU's updates; `ranks_here` share the machine's cores.
    Beside a GPU the model's thread and I/O keep a core each: a kernel launched late costs more than
    an optimizer with two threads fewer."""
    cores = available_cores() // ranks_here
    return max(1, cores - 2 if plan.gpu else cores)


def make_plan(config: OffloadConfig, model: ModelShape, hardware: Hardware) -> Plan:
    """Make the plan of a model on some hardware. Raise BudgetError if a budget cannot work."""
    plan = lay_out_plan(config, model, hardware)
    check_plan(plan, hardware)
    return plan


def check_plan(plan: Plan, hardware: Hardware) -> None:
    """Raise BudgetError, naming the missing bytes and the key, if a tier cannot hold its part."""
    missing = shortfalls(plan, hardware)
    if missing:
        raise BudgetError(missing[0].message)


def lay_out_plan(config: OffloadConfig, model: ModelShape, hardware: Hardware) -> Plan:
    """Make the plan that the configuration describes, whether or not it fits (see `shortfalls`)."""
    return solve(config, model, hardware).best.plan
