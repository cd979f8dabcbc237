"""A plan in words: what `offload plan` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from torch import nn

from offload.homes import compute_device, this_machine
from offload.planning.plan import Plan, breakdown, needed_nbytes
from offload.planning.planner import make_plan
from offload.tiers.extent import TierName
from offload.tiers.ledger import StateClass
from offload.tiers.units import format_bytes
from offload.zero.discovery import discover

if TYPE_CHECKING:
    from offload.config import OffloadConfig

_CLASSES = (
    StateClass.PARAMETERS, StateClass.GRADIENTS, StateClass.OPTIMIZER, StateClass.STAGING,
    StateClass.ACTIVATIONS,
)  # fmt: skip


def describe(config: OffloadConfig, model: nn.Module) -> RenderableType:
    """The resolved placement of `model` (may be on meta) on this machine, with its bytes.

    Raises what `offload.initialize` would raise before it allocates anything.
    """
    config = config.resolved()
    device = compute_device(config)
    shape = discover(model, config.groups.blocks).shape()
    plan = make_plan(config, shape, this_machine(config.nvme, device))
    return Group(_headline(config, plan, device), _bytes(plan), _needs(plan))


def _headline(config: OffloadConfig, plan: Plan, device: torch.device) -> RenderableType:
    numel = sum(spec.numel for group in plan.groups for spec in group.layout.params)
    trainable = sum(
        spec.numel for group in plan.groups for spec in group.layout.params if spec.trainable
    )
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("model", f"{numel:,} parameters ({trainable:,} trainable)")
    table.add_row("groups", f"{len(plan.groups)}, the largest {_largest(plan)}")
    table.add_row("computes on", f"{device.type}, precision {config.precision}")
    table.add_row("master", f"{config.optimizer.master}, moments {config.optimizer.states}")
    table.add_row("chunk", f"{plan.chunk_numel:,} elements; {plan.prefetch} groups fetched ahead")
    for state_class, placement in plan.placements.items():
        chosen = getattr(config.placement, state_class) is None
        table.add_row(state_class, placement.describe() + (" (auto)" if chosen else ""))
    return table


def _largest(plan: Plan) -> str:
    if not plan.groups:
        return "nothing"
    group = max(plan.groups, key=lambda g: g.parameters)
    return f"{group.name} with {format_bytes(group.parameters)}"


def _bytes(plan: Plan) -> Table:
    table = Table(title="Bytes at home", title_justify="left")
    table.add_column("")
    for tier in TierName:
        table.add_column(tier, justify="right", no_wrap=True)
    for state_class in _CLASSES:
        held = [plan.expected[tier].get(state_class, 0) for tier in TierName]
        table.add_row(state_class, *map(_cell, held))
    table.add_section()
    table.add_row("total", *(_cell(plan.total(tier)) for tier in TierName))
    table.add_row("needed at least", *(_cell(needed_nbytes(plan, tier)) for tier in TierName))
    table.add_row("budget", *(_cell(plan.budgets[tier]) for tier in TierName))
    return table


def _cell(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def _needs(plan: Plan) -> RenderableType:
    lines = [
        f"{tier} needs {format_bytes(needed_nbytes(plan, tier))}: {breakdown(plan, tier)}"
        for tier in TierName
        if needed_nbytes(plan, tier)
    ]
    return "\n".join(lines)
