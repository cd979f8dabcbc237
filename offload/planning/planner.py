"""Budgets in, a plan out: which class of state lives where, and whether that can work."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from offload.config_fields import Percent, TierSplit
from offload.planning.activation_plan import least_window, share_out
from offload.planning.device_plan import plan_device, with_device
from offload.planning.plan import Hardware, Plan, needed_nbytes
from offload.planning.plan_sizes import (
    CLASSES,
    ITEMSIZE,
    STAGING_BUFFERS,
    GroupBytes,
    Sizes,
    largest_unit,
    measure,
    sizes_of,
    staging_nbytes_of,
    sums_nbytes_of,
    window_nbytes_of,
    with_records,
)
from offload.planning.shortfalls import shortfalls as shortfalls
from offload.planning.tuning import Streamed, choose
from offload.swap.worker import available_cores
from offload.tiers.errors import BudgetError
from offload.tiers.extent import TierName
from offload.tiers.ledger import StateClass
from offload.tiers.placement import Placement
from offload.tiers.units import format_bytes
from offload.zero.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig, ThreadsConfig

_log = logging.getLogger("offload")


def resolved_config(config: OffloadConfig, plan: Plan, device: str) -> OffloadConfig:
    """`config` with every `auto` that the machine and the model decide filled in."""
    splits = {
        str(state_class): TierSplit(**{str(tier): share for tier, share in placement.shares})
        for state_class, placement in plan.placements.items()
    }
    update = {
        "device": device,
        "budget": config.budget.model_copy(
            update={str(tier): nbytes for tier, nbytes in plan.budgets.items()}
        ),
        "placement": config.placement.model_copy(update=splits),
        "prefetch": plan.prefetch,
        "threads": _threads(config, gpu=plan.gpu),
    }
    resolved = config.resolved()
    optimizer = resolved.optimizer.model_copy(update={"chunk": plan.chunk_numel})
    return resolved.model_copy(update={**update, "optimizer": optimizer})


def _threads(config: OffloadConfig, *, gpu: bool) -> ThreadsConfig:
    if config.threads.optimizer != "auto":
        return config.threads
    cores = available_cores()
    # Beside a GPU the model's thread and I/O keep a core each: a kernel launched late costs more
    # than an optimizer with two threads fewer.
    return config.threads.model_copy(update={"optimizer": max(1, cores - 2) if gpu else cores})


def resolve_budgets(
    config: OffloadConfig, hardware: Hardware, on_cpu_device: int
) -> dict[TierName, int]:
    """Bytes per tier. `on_cpu_device`: what an automatic device budget is on a CPU."""
    budget = config.budget
    device_auto = int(hardware.device_nbytes * 0.8) if hardware.device_nbytes else on_cpu_device
    device_whole = hardware.device_nbytes or hardware.host_nbytes
    return {
        TierName.DEVICE: _resolve(budget.device, device_whole, device_auto),
        TierName.HOST: _resolve(
            budget.host, hardware.host_nbytes, int(hardware.host_free_nbytes * 0.7)
        ),
        TierName.NVME: _resolve(
            budget.nvme, hardware.nvme_free_nbytes, int(hardware.nvme_free_nbytes * 0.9)
        ),
    }


def _resolve(given: int | Percent | None, whole: int, auto: int) -> int:
    if given is None:
        return auto
    return int(whole * given.fraction) if isinstance(given, Percent) else given


def make_plan(config: OffloadConfig, model: ModelShape, hardware: Hardware) -> Plan:
    """The plan of a model on some hardware. BudgetError if a budget cannot work."""
    _check_least(config, model, hardware)
    plan = lay_out_plan(config, model, hardware)
    missing = shortfalls(plan, hardware)
    if missing:
        raise BudgetError(missing[0].message)
    _tell_of_sums(plan)
    return plan


def lay_out_plan(config: OffloadConfig, model: ModelShape, hardware: Hardware) -> Plan:
    """The plan as the configuration asks for it, whether or not it fits (see `shortfalls`)."""
    config = _tuned(config, model, hardware)
    groups = measure(config, model)
    sizes = sizes_of(config)
    explicit = _explicit(config)
    budgets = resolve_budgets(config, hardware, _device_demand(explicit, groups))
    gpu = hardware.device_nbytes > 0
    device = plan_device(explicit, groups, sizes, hardware, budgets[TierName.DEVICE])
    activations = TierName(config.placement.activations.tier)
    window = window_nbytes_of(model, groups)
    taken = window + least_window(activations, gpu)
    free = dict(budgets)
    free[TierName.DEVICE] -= device.total_nbytes if device is not None else 0
    placements = dict(explicit)
    if config.sums_gradients:  # never an fp32 gradient file
        placements.setdefault(StateClass.GRADIENTS, Placement(((TierName.HOST, 1.0),)))
    for state_class in CLASSES:
        if state_class not in placements:
            placements[state_class] = _place(state_class, groups, free, placements, taken)
    sums = sums_nbytes_of(model, groups) if config.micro_batches > 1 else 0
    unit = largest_unit(model, groups)
    plan = _build(placements, groups, budgets, sizes, window, gpu, unit, sums)
    plan = with_device(plan, device)
    return _with_activations(plan, activations)


def _tell_of_sums(plan: Plan) -> None:
    """Say what is not where the configuration puts it."""
    if TierName.NVME not in dict(plan.placements[StateClass.GRADIENTS].shares):
        return
    summed = [group for group in plan.groups if group.summed]
    if summed:
        _log.warning(
            "placement.gradients: %d groups that several blocks share get a gradient from each "
            "under micro_batches; these fp32 sums (%s) stay on host, not on nvme: %s",
            len(summed), format_bytes(sum(group.gradients for group in summed)),
            ", ".join(group.name for group in summed[:3]) + (" ..." if len(summed) > 3 else ""),
        )  # fmt: skip


def _tuned(config: OffloadConfig, model: ModelShape, hardware: Hardware) -> OffloadConfig:
    """`config` with chunk and prefetch chosen, where they are open, for the nvme that is there."""
    chunk, prefetch = config.optimizer.chunk, config.prefetch
    if chunk != "auto" and prefetch != "auto":
        return config
    sizes = sizes_of(config)
    numels = [group.numel for group in model.groups]
    chunks = sizes.record_nbytes(1 << 20) / (1 << 20) + sizes.itemsize + sizes.gradient_itemsize
    budget = resolve_budgets(config, hardware, 0)[TierName.HOST]
    named = list(_explicit(config).values())
    used = any(TierName.NVME in placement.tiers for placement in named)
    overflowing = len(named) < len(CLASSES) and sum(numels) * chunks > budget
    measure = hardware.measure_nvme if used or overflowing else None
    streamed = Streamed([n * sizes.itemsize for n in numels], chunks, STAGING_BUFFERS, budget)
    chosen = choose(streamed, measure)
    optimizer = config.optimizer.model_copy(
        update={"chunk": chosen.chunk_numel if chunk == "auto" else chunk}
    )
    depth = chosen.prefetch if prefetch == "auto" else prefetch
    return config.model_copy(update={"optimizer": optimizer, "prefetch": depth})


def _check_least(config: OffloadConfig, model: ModelShape, hardware: Hardware) -> None:
    """Refuse what no placement could hold, before counting it chunk by chunk."""
    numel = model.numel
    least = numel * ITEMSIZE[config.precision]
    there = hardware.device_nbytes + hardware.host_nbytes + hardware.nvme_free_nbytes
    if least > there:
        raise BudgetError(
            f"{numel:,} parameters take {format_bytes(least)} without gradients and optimizer "
            f"states; this machine has {format_bytes(there)} of memory and free disk together: "
            "make the model smaller, or add a path to nvme.paths"
        )


def _explicit(config: OffloadConfig) -> dict[StateClass, Placement]:
    named: dict[StateClass, TierSplit | None] = {
        StateClass.PARAMETERS: config.placement.parameters,
        StateClass.GRADIENTS: config.placement.gradients,
        StateClass.OPTIMIZER: config.placement.optimizer,
    }
    return {
        state_class: Placement(tuple((TierName(t), s) for t, s in split.fractions.items()))
        for state_class, split in named.items()
        if split is not None
    }


def _bytes_of(state_class: StateClass, groups: Sequence[GroupBytes]) -> int:
    return sum(getattr(group, state_class) for group in groups)


def _device_demand(placements: Mapping[StateClass, Placement], groups: Sequence[GroupBytes]) -> int:
    """Bytes that explicit placements ask of the device tier, with room for uneven pieces."""
    demand = 0
    for state_class, placement in placements.items():
        share = dict(placement.shares).get(TierName.DEVICE, 0.0)
        if share:
            pieces = [getattr(group, state_class) for group in groups]
            demand += int(sum(pieces) * share) + (max(pieces, default=0) if share < 1 else 0)
    return demand


def _place(
    state_class: StateClass, groups: Sequence[GroupBytes], budgets: Mapping[TierName, int],
    placed: Mapping[StateClass, Placement], window: int,
) -> Placement:  # fmt: skip
    """Fill the fastest tier that has room, in whole or in part, and leave the rest to the next."""
    needed = max(1, _bytes_of(state_class, groups))
    shares: list[tuple[TierName, float]] = []
    left = 1.0
    for tier in _order(state_class, budgets):
        free = budgets[tier] - sum(
            dict(placement.shares).get(tier, 0.0) * _bytes_of(other, groups)
            for other, placement in placed.items()
        )
        whole = free >= needed * left and (
            tier is not TierName.HOST or free - window >= needed * left
        )
        if tier is TierName.NVME or whole:
            shares.append((tier, left))
            return Placement(tuple(shares))
        if state_class is StateClass.PARAMETERS or tier is TierName.DEVICE:
            continue  # a partly resident class pays only where pieces stream
        share = max(0.0, min(left, (free - 2 * window) / needed))
        share = int(share * 100) / 100
        if share > 0:
            shares.append((tier, share))
            left -= share
    return Placement(tuple(shares))


def _order(state_class: StateClass, budgets: Mapping[TierName, int]) -> list[TierName]:
    order = [TierName.HOST, TierName.NVME]
    if state_class is StateClass.PARAMETERS and budgets[TierName.DEVICE]:
        order.insert(0, TierName.DEVICE)
    return order


def _build(
    placements: Mapping[StateClass, Placement], groups: tuple[GroupBytes, ...],
    budgets: Mapping[TierName, int], sizes: Sizes, window: int, gpu: bool,
    unit_nbytes: int, sums_nbytes: int,
) -> Plan:  # fmt: skip
    parameters = placements[StateClass.PARAMETERS].assign([g.parameters for g in groups])
    assigned = placements[StateClass.GRADIENTS].assign([g.gradients for g in groups])
    gradients = [
        TierName.HOST if group.summed and tier is TierName.NVME else tier
        for group, tier in zip(groups, assigned, strict=True)
    ]
    flat = placements[StateClass.OPTIMIZER].assign([r for g in groups for r in g.records])
    records = []
    for group in groups:
        records.append(tuple(flat[: len(group.records)]))
        flat = flat[len(group.records) :]
    groups = tuple(
        with_records(group, tiers, sizes) for group, tiers in zip(groups, records, strict=True)
    )
    expected: dict[TierName, dict[StateClass, int]] = {tier: defaultdict(int) for tier in TierName}
    for group, parameter, gradient, chunks in zip(
        groups, parameters, gradients, records, strict=True
    ):
        expected[parameter][StateClass.PARAMETERS] += group.parameters
        expected[gradient][StateClass.GRADIENTS] += group.gradients
        for tier, nbytes in zip(chunks, group.records, strict=True):
            expected[tier][StateClass.OPTIMIZER] += nbytes
    staging = staging_nbytes_of(placements, groups, sizes, gpu)
    buffers = STAGING_BUFFERS if staging else 0
    expected[TierName.HOST][StateClass.STAGING] += staging * buffers
    expected[TierName.DEVICE if gpu else TierName.HOST][StateClass.STAGING] += sums_nbytes
    return Plan(
        dict(budgets), dict(placements), groups, tuple(parameters), tuple(gradients),
        tuple(records), sizes.record_formats, sizes.chunk_numel,
        sizes.prefetch, buffers, staging, gpu,
        unit_nbytes, sums_nbytes, window, expected,
    )  # fmt: skip


def _with_activations(plan: Plan, tier: TierName) -> Plan:
    """Give them what all other states leave of the budgets, or a share of it."""
    least = least_window(tier, plan.gpu)
    if not least:
        return plan
    expected = {name: dict(by_class) for name, by_class in plan.expected.items()}
    expected[TierName.HOST][StateClass.ACTIVATIONS] = least
    plan = replace(plan, expected=expected)
    left = {name: plan.budgets[name] - needed_nbytes(plan, name) for name in TierName}
    activations = share_out(tier, left[TierName.HOST], left[TierName.NVME], cached=plan.uses_nvme)
    expected[TierName.HOST][StateClass.ACTIVATIONS] = activations.window_nbytes
    return replace(plan, activations=activations)
