"""Budgets in, placement and expected bytes out: the arithmetic that runtime and tools share.

Everything here is counted from the model's own groups; nothing is allocated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload import machine
from offload.config_fields import Percent, TierSplit
from offload.tiers.errors import BudgetError, UnsupportedError
from offload.tiers.extent import PAGE_NBYTES, TierName
from offload.tiers.ledger import StateClass
from offload.tiers.placement import Placement
from offload.tiers.units import format_bytes, round_up
from offload.zero.discovery import Discovery
from offload.zero.layout import Layout, lay_out
from offload.zero.records import Master, RecordFormat
from offload.zero.runtime import AUTO_PREFETCH

if TYPE_CHECKING:
    from offload.config import OffloadConfig

STAGING_BUFFERS = 4  # read | compute | write, and one to spare
_ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
_CLASSES = (StateClass.PARAMETERS, StateClass.GRADIENTS, StateClass.OPTIMIZER)


@dataclass(frozen=True)
class Hardware:
    """What a plan may use. Bytes; `device_nbytes` is 0 where the model computes on the CPU."""

    device_nbytes: int
    host_nbytes: int  # may ever be held (cgroup limits count)
    host_free_nbytes: int
    nvme_free_nbytes: int


@dataclass(frozen=True)
class GroupBytes:
    """One group's states. Bytes in whole pages, as the tiers account them."""

    name: str
    layout: Layout
    parameters: int
    gradients: int
    records: tuple[int, ...]

    @property
    def optimizer(self) -> int:
        return sum(self.records)


@dataclass(frozen=True)
class Plan:
    """A placement with its bytes. Tiers per group (records: per group and chunk)."""

    budgets: Mapping[TierName, int]
    placements: Mapping[StateClass, Placement]
    groups: tuple[GroupBytes, ...]
    parameters: tuple[TierName, ...]
    gradients: tuple[TierName, ...]
    records: tuple[tuple[TierName, ...], ...]
    chunk_numel: int
    staging_buffers: int
    staging_nbytes: int  # of one buffer
    gpu: bool  # the device tier is GPU memory: parameters are copied there
    unit_nbytes: int  # largest parameters that are gathered at the same time
    window_nbytes: int  # least memory for copies of what lives on nvme
    expected: Mapping[TierName, Mapping[StateClass, int]]  # at home, staging included

    def total(self, tier: TierName) -> int:
        return sum(self.expected[tier].values())

    @property
    def uses_nvme(self) -> bool:
        return self.total(TierName.NVME) > 0


@dataclass(frozen=True)
class _Sizes:
    """The numbers of the configuration that bytes depend on."""

    itemsize: int
    gradient_itemsize: int
    record_format: RecordFormat
    chunk_numel: int


def measure(config: OffloadConfig, discovery: Discovery) -> tuple[GroupBytes, ...]:
    """Bytes of every group's states."""
    sizes = _sizes(config)
    return tuple(_group_bytes(plan.name, lay_out(plan.params), sizes) for plan in discovery.groups)


def record_format(config: OffloadConfig) -> RecordFormat:
    return RecordFormat(Master(config.master), config.optimizer.amsgrad)


def _sizes(config: OffloadConfig) -> _Sizes:
    itemsize = _ITEMSIZE[config.precision]
    several = config.gradient_accumulation_steps > 1
    return _Sizes(itemsize, 4 if several else itemsize, record_format(config), config.chunk_numel)


def _group_bytes(name: str, layout: Layout, sizes: _Sizes) -> GroupBytes:
    chunks = layout.chunks(sizes.chunk_numel)
    return GroupBytes(
        name=name or "(root)",
        layout=layout,
        parameters=_pages(layout.numel * sizes.itemsize),
        gradients=_pages(layout.numel_trainable * sizes.gradient_itemsize),
        records=tuple(_pages(sizes.record_format.nbytes(len(chunk))) for chunk in chunks),
    )


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
        "prefetch": AUTO_PREFETCH if config.prefetch == "auto" else config.prefetch,
    }
    return config.resolved().model_copy(update=update)


def _pages(nbytes: int) -> int:
    return round_up(max(nbytes, 1), PAGE_NBYTES)


# ------------------------------------------------------------------------------- budgets
def read_hardware(device_nbytes: int, nvme_free_nbytes: int) -> Hardware:
    """This machine, as far as this process may use it."""
    return Hardware(
        device_nbytes, machine.memory_limit_nbytes(), machine.available_memory_nbytes(),
        nvme_free_nbytes,
    )  # fmt: skip


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


# ------------------------------------------------------------------------------- placement
def make_plan(config: OffloadConfig, discovery: Discovery, hardware: Hardware) -> Plan:
    """The plan of a model on some hardware. BudgetError if a budget cannot work."""
    _check_least(config, discovery, hardware)
    groups = measure(config, discovery)
    sizes = _sizes(config)
    explicit = _explicit(config)
    budgets = resolve_budgets(config, hardware, _device_demand(explicit, groups))
    window = _window(discovery, groups)
    placements = dict(explicit)
    for state_class in _CLASSES:
        if state_class not in placements:
            placements[state_class] = _place(state_class, groups, budgets, placements, window)
    gpu = hardware.device_nbytes > 0
    _check_supported(placements, gpu)
    plan = _build(placements, groups, budgets, sizes, window, gpu, _largest_unit(discovery, groups))
    _check(plan, hardware)
    return plan


def _check_least(config: OffloadConfig, discovery: Discovery, hardware: Hardware) -> None:
    """Refuse what no placement could hold, before counting it chunk by chunk."""
    numel = sum(param.numel() for group in discovery.groups for _, param in group.params)
    least = numel * _ITEMSIZE[config.precision]
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


def _window(discovery: Discovery, groups: Sequence[GroupBytes]) -> int:
    """Memory that copies of nvme state need at least: one unit's parameters, those of an enclosing
    module that stay gathered meanwhile, and one group's gradients or one record.

    They lie where earlier copies left room: with `n` copies in use, the space between them may be
    in `n + 1` pieces, each just too small for the next copy. That much more is always enough.
    """
    root = [groups[index].parameters for u in discovery.units if not u.name for index in u.groups]
    other = max((max(group.gradients, *group.records, 0) for group in groups), default=0)
    window = 0
    for unit in discovery.units:
        pieces = [groups[index].parameters for index in unit.groups]
        pieces += [*(root if unit.name else ()), other]
        window = max(window, sum(pieces) + (len(pieces) - 1) * max(pieces))
    return window


def _largest_unit(discovery: Discovery, groups: Sequence[GroupBytes]) -> int:
    """Parameters that are gathered at the same time: a unit's and an enclosing root's."""
    root = sum(groups[i].parameters for u in discovery.units if not u.name for i in u.groups)
    units = [sum(groups[i].parameters for i in u.groups) for u in discovery.units if u.name]
    return root + max(units, default=0)


def _build(
    placements: Mapping[StateClass, Placement], groups: tuple[GroupBytes, ...],
    budgets: Mapping[TierName, int], sizes: _Sizes, window: int, gpu: bool,
    unit_nbytes: int,
) -> Plan:  # fmt: skip
    parameters = placements[StateClass.PARAMETERS].assign([g.parameters for g in groups])
    gradients = placements[StateClass.GRADIENTS].assign([g.gradients for g in groups])
    flat = placements[StateClass.OPTIMIZER].assign([r for g in groups for r in g.records])
    records = []
    for group in groups:
        records.append(tuple(flat[: len(group.records)]))
        flat = flat[len(group.records) :]
    expected: dict[TierName, dict[StateClass, int]] = {tier: defaultdict(int) for tier in TierName}
    for group, parameter, gradient, chunks in zip(
        groups, parameters, gradients, records, strict=True
    ):
        expected[parameter][StateClass.PARAMETERS] += group.parameters
        expected[gradient][StateClass.GRADIENTS] += group.gradients
        for tier, nbytes in zip(chunks, group.records, strict=True):
            expected[tier][StateClass.OPTIMIZER] += nbytes
    staging = _staging_nbytes(placements, groups, sizes, gpu)
    buffers = STAGING_BUFFERS if staging else 0
    expected[TierName.HOST][StateClass.STAGING] += staging * buffers
    return Plan(
        dict(budgets), dict(placements), groups, tuple(parameters), tuple(gradients),
        tuple(records), sizes.chunk_numel, buffers, staging, gpu, unit_nbytes, window, expected,
    )  # fmt: skip


def _staging_nbytes(
    placements: Mapping[StateClass, Placement], groups: Sequence[GroupBytes], sizes: _Sizes,
    gpu: bool,
) -> int:  # fmt: skip
    """One buffer: the largest chunk of every class that may have to be staged."""
    longest = max((g.layout.numel for g in groups), default=0)
    numel = min(sizes.chunk_numel, longest)
    per_class = {
        StateClass.PARAMETERS: _pages(numel * sizes.itemsize),
        StateClass.GRADIENTS: _pages(numel * sizes.gradient_itemsize),
        StateClass.OPTIMIZER: _pages(sizes.record_format.nbytes(numel)),
    }
    away = {TierName.NVME, TierName.DEVICE} if gpu else {TierName.NVME}
    return sum(
        nbytes for state_class, nbytes in per_class.items()
        if away.intersection(placements[state_class].tiers)
    )  # fmt: skip


# ------------------------------------------------------------------------------- checks
def _check_supported(placements: Mapping[StateClass, Placement], gpu: bool) -> None:
    for state_class in (StateClass.GRADIENTS, StateClass.OPTIMIZER):
        if gpu and TierName.DEVICE in placements[state_class].tiers:
            raise UnsupportedError(
                f"placement.{state_class}: device needs the optimizer to run on the GPU, which "
                "it does not do yet; use host or nvme"
            )


def _check(plan: Plan, hardware: Hardware) -> None:
    """BudgetError, naming the missing bytes and the key, if a tier cannot hold its part."""
    for tier in (TierName.DEVICE, TierName.HOST, TierName.NVME):
        needed = needed_nbytes(plan, tier)
        budget = plan.budgets[tier]
        if needed > budget:
            raise BudgetError(
                f"budget.{tier}: {format_bytes(budget)} is {format_bytes(needed - budget)} short "
                f"of the {format_bytes(needed)} needed ({breakdown(plan, tier)}); "
                f"{_remedy(plan, tier)}"
            )
    _check_machine(plan, hardware)


def _check_machine(plan: Plan, hardware: Hardware) -> None:
    if plan.budgets[TierName.HOST] > hardware.host_nbytes:
        raise BudgetError(
            f"budget.host: {format_bytes(plan.budgets[TierName.HOST])} is more than the "
            f"{format_bytes(hardware.host_nbytes)} of RAM that this process may use; lower it, or "
            "write a percentage"
        )
    memory = needed_nbytes(plan, TierName.HOST)
    if not hardware.device_nbytes:
        memory += needed_nbytes(plan, TierName.DEVICE)
    if memory > hardware.host_nbytes:
        raise BudgetError(
            f"budget.host: the plan needs {format_bytes(memory)} of RAM, this process may use "
            f"{format_bytes(hardware.host_nbytes)}; move a class to nvme"
        )
    disk = needed_nbytes(plan, TierName.NVME)
    if disk > hardware.nvme_free_nbytes:
        raise BudgetError(
            f"budget.nvme: the plan needs {format_bytes(disk)} on disk, "
            f"{format_bytes(hardware.nvme_free_nbytes)} are free under nvme.paths; free space, or "
            "add a path to nvme.paths"
        )


def needed_nbytes(plan: Plan, tier: TierName) -> int:
    """What a tier has to hold at the same time, at least."""
    needed = plan.total(tier)
    if tier is TierName.HOST and plan.uses_nvme:
        needed += host_window(plan)
    if tier is TierName.NVME and needed:
        needed += nvme_slack(plan)
    if tier is TierName.DEVICE and plan.gpu and set(plan.parameters) != {TierName.DEVICE}:
        needed += plan.unit_nbytes
    return needed


def host_window(plan: Plan) -> int:
    """Least memory for copies of what lives on nvme."""
    on_nvme = {c for c in _CLASSES if TierName.NVME in plan.placements[c].tiers}
    if StateClass.PARAMETERS in on_nvme or StateClass.GRADIENTS in on_nvme:
        return plan.window_nbytes
    return max((max(g.records, default=0) for g in plan.groups), default=0)


def nvme_slack(plan: Plan) -> int:
    """Extents whose new version is being written while the old one is still valid."""
    largest = max((g.parameters + g.gradients for g in plan.groups), default=0)
    return 2 * largest + plan.staging_buffers * plan.staging_nbytes


def breakdown(plan: Plan, tier: TierName) -> str:
    terms = [f"{name} {format_bytes(n)}" for name, n in plan.expected[tier].items() if n]
    if tier is TierName.HOST and plan.uses_nvme:
        terms.append(f"window {format_bytes(host_window(plan))}")
    if tier is TierName.NVME and plan.uses_nvme:
        terms.append(f"new versions {format_bytes(nvme_slack(plan))}")
    return " + ".join(terms) or "nothing"


def _remedy(plan: Plan, tier: TierName) -> str:
    if tier is TierName.NVME:
        return "raise budget.nvme"
    classes = [c for c in _CLASSES if plan.expected[tier].get(c)]
    below = TierName.HOST if tier is TierName.DEVICE else TierName.NVME
    if not classes:
        return f"raise budget.{tier}, or lower optimizer.chunk"
    largest = max(classes, key=lambda c: plan.expected[tier][c])
    return f"raise budget.{tier}, or set placement.{largest}: {below}"
