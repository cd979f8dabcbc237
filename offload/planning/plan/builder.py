"""Builds a plan from the placement of every class of state: bytes per tier, windows, buffers.

Values that do not depend on the placement (budgets, chunks, bytes of groups) are computed once, so
that many placements of one model can be compared.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offload.config.fields import Percent
from offload.planning.plan.buffers import (
    held_chunks,
    kinds_of,
    plan_device,
    plan_shared,
    products_of,
    staging_nbytes_of,
)
from offload.planning.plan.chunk_and_prefetch import chunk_in_memory, prefetch_depth, streamed_chunk
from offload.planning.plan.kv_plan import plan_kv
from offload.planning.plan.plan import (
    ActivationPlan,
    Hardware,
    Plan,
    device_upper_bound,
    min_window,
    needed_nbytes,
)
from offload.planning.plan.sizes import (
    CLASSES,
    ITEMSIZE,
    STAGING_BUFFERS,
    Placements,
    gathered_unit,
    largest_unit,
    measure,
    sizes_of,
    stored_nbytes,
    tiers_of,
)
from offload.tiers.errors import ConfigError
from offload.tiers.ledger import StateClass
from offload.tiers.placement import Placement
from offload.tiers.tier import PAGE_NBYTES, TIERS, Tier
from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig

_BESIDE_ACTIVATIONS = 0.7  # share of free RAM for the tiers on a CPU; the rest for activations
MAX_RECORDS = 1 << 20  # per model, when the chunk is chosen: records are assigned one by one


class PlanBuilder:
    """Builds the plans of one model, one configuration and one machine, by placement."""

    def __init__(
        self, config: OffloadConfig, model: ModelShape, hardware: Hardware, *,
        device_is_open: bool = False,
    ) -> None:  # fmt: skip
        """`device_is_open`: the device budget is all the free memory of a GPU, possibly more than
        the model needs."""
        config = config.settled()
        sharding = hardware.sharding
        model = model.sharded(sharding.ranks, sharding.replicas)
        self.explicit = explicit_placements(config)
        self.config = tuned(config, self.explicit, model, hardware)
        _check_records(self.config, model)
        self.model = model
        self.hardware = hardware
        self.gpu = hardware.device_nbytes > 0
        self._device_is_open = self.gpu and device_is_open
        self.sizes = sizes_of(self.config)
        self.groups = measure(self.config, model, sharding)
        self._kinds = kinds_of(self.groups)  # one for thousands of equal experts
        there = [name for name in self.explicit if Tier.DEVICE in tiers_of(self.explicit, name)]
        demand = sum(getattr(group, name) for name in there for group in self.groups)  # at most
        self.budgets = resolve_budgets(config, hardware, demand)
        # the window holds copies of states on nvme: a unit's parameters, and one gradient or record
        other = max((max(g.gradients, *g.records, 0) for g in self.groups), default=0)
        self.window_nbytes = gathered_unit(model, self.groups, other)
        self.dequantized_nbytes = largest_unit(model, [g.dequantized for g in self.groups])
        self.unit_nbytes = gathered_unit(model, self.groups)
        self.shared = {  # by whether some parameters are not at home where the model computes
            moves: plan_shared(sharding, model, self.groups, self.config, moves=moves)
            for moves in (False, True)
        }
        self.kv = plan_kv(self.config, model, itemsize=self.sizes.itemsize, gpu=self.gpu)
        self._staging_buffers = STAGING_BUFFERS + held_chunks(self._kinds, self.sizes.chunk_numel)
        format_ = self.config.optimizer.ns_dtype
        self._products = products_of(self._kinds, ITEMSIZE[format_], gpu=self.gpu)
        self._assigned: dict[tuple[StateClass, Placement, bool], _Assigned] = {}

    def share_with(self, other: PlanBuilder) -> None:
        """Reuse the assignments of `other` if both have the same groups and sizes."""
        if self.groups == other.groups and self.sizes == other.sizes:
            self._assigned = other._assigned

    def build(self, placements: Placements) -> Plan:
        """Build the plan of `placements`, whether or not it fits."""
        placements = {each: placements[each] for each in CLASSES}
        parameters, gradients, records = (self._assign(placements, each) for each in CLASSES)
        staging = staging_nbytes_of(placements, self._kinds, self.sizes, self.gpu)
        weights = tiers_of(placements, StateClass.PARAMETERS)
        moves = not all(tier.in_place(gpu=self.gpu) for tier in weights)
        homes = parameters.homes, gradients.homes, records.homes
        plan = Plan(
            budgets=dict(self.budgets), groups=self.groups, placements=placements,
            parameters=tuple(itertools.chain.from_iterable(parameters.tiers)),
            gradients=tuple(itertools.chain.from_iterable(gradients.tiers)),
            records=records.tiers, homes=dict(zip(CLASSES, homes, strict=True)),
            record_format=self.sizes.record_format, chunk_numel=self.sizes.chunk_numel,
            prefetch=self.sizes.prefetch, staging_buffers=self._staging_buffers if staging else 0,
            products=(self.config.optimizer.ns_dtype, self.config.optimizer.ns_steps or 0),
            products_nbytes=self._products,
            staging_nbytes=staging, gpu=self.gpu, unit_nbytes=self.unit_nbytes,
            window_nbytes=self.window_nbytes,
            dequantized_nbytes=self.dequantized_nbytes, expected={},
            device=plan_device(
                placements, self._kinds, self.sizes, self.budgets[Tier.DEVICE],
                self.config.gradient_accumulation_steps, self.hardware.kernels_missing,
            ) if self.gpu else None,
            sharding=self.hardware.sharding, shared=self.shared[moves], kv=self.kv,
            gpu_budget_nbytes=self.hardware.gpu_budget_nbytes,
        )  # fmt: skip
        plan = replace(plan, expected=_expected(plan))
        if self._device_is_open:  # the tier is one allocation: take no more than it can use
            room = plan.budgets[Tier.DEVICE]
            budgets = {**plan.budgets, Tier.DEVICE: min(room, device_upper_bound(plan))}
            plan = replace(plan, budgets=budgets, device_room_nbytes=room)
        return _with_activations(plan, Tier.named(self.config.placement.activations.tier))

    def _assign(self, placements: Placements, state_class: StateClass) -> _Assigned:
        """Assign the pieces of a class to tiers, in one sequence, so that each tier's share holds
        across groups. Once per placement: a large model has hundreds of thousands of records, and
        compared plans often differ in other classes only.

        A GPU's share of what an update needs are the first groups: forward waits for their updates
        first, and their gradients come last. All other groups are then left to the CPU as a whole,
        which can update them while backward goes on. Its share of parameters are the same groups
        where it updates some, so that these need not move."""
        updates = placements[StateClass.OPTIMIZER].tiers[0].on_device
        first = self.gpu and (updates or state_class is not StateClass.PARAMETERS)
        key = state_class, placements[state_class], first
        if key in self._assigned:
            return self._assigned[key]
        pieces = [group.pieces(state_class) for group in self.groups]
        nbytes_of_all = list(itertools.chain.from_iterable(pieces))
        assigned = iter(key[1].assign(nbytes_of_all, device_first=first))
        tiers = tuple(tuple(itertools.islice(assigned, len(each))) for each in pieces)
        if state_class is StateClass.GRADIENTS:  # fp32 sums are never kept in files
            tiers = tuple(
                (Tier.HOST,) if group.summed and each == (Tier.NVME,) else each
                for group, each in zip(self.groups, tiers, strict=True)
            )
        homes: dict[Tier, int] = defaultdict(int)
        for each, sizes in zip(tiers, pieces, strict=True):
            for tier, nbytes in zip(each, sizes, strict=True):
                homes[tier] += nbytes
        self._assigned[key] = _Assigned(tiers, homes)
        return self._assigned[key]


@dataclass(frozen=True)
class _Assigned:
    """A class of states in its tiers."""

    tiers: tuple[tuple[Tier, ...], ...]  # per group and piece
    homes: Mapping[Tier, int]  # bytes


def _expected(plan: Plan) -> dict[Tier, dict[StateClass, int]]:
    expected: dict[Tier, dict[StateClass, int]] = {tier: defaultdict(int) for tier in TIERS}
    for state_class, homes in plan.homes.items():
        for tier, nbytes in homes.items():
            expected[tier][state_class] += nbytes
    computing = expected[Tier.DEVICE if plan.gpu else Tier.HOST]
    staged = expected[Tier.HOST]
    staged[StateClass.STAGING] += plan.staging_nbytes * plan.staging_buffers
    for place, nbytes in zip((computing, staged), plan.products_nbytes, strict=True):
        place[StateClass.STAGING] += nbytes
    if plan.device is not None:
        expected[Tier.DEVICE][StateClass.STAGING] += plan.device.total_nbytes
        staged[StateClass.STAGING] += plan.device.landing_buffers * plan.device.ring_nbytes
    if plan.shared is not None:
        computing[StateClass.STAGING] += plan.shared.total_nbytes
    for tier, nbytes in (plan.kv.expected if plan.kv is not None else {}).items():
        expected[tier][StateClass.KV] += nbytes
    return expected


def _with_activations(plan: Plan, tier: Tier) -> Plan:
    """Give saved activations the part of the budgets that other states leave, at least the least
    window.

    They get all that is left of the memory, or half if copies of other states or the page cache can
    use the rest. An eighth of what is left on nvme stays free, since rewritten extents of
    other states need holes of their size.
    """
    min_nbytes = min_window(tier, plan.gpu)
    if not min_nbytes:
        return plan
    disk = max(0, plan.budgets[tier] - needed_nbytes(plan, tier)) * 7 // 8 if tier.is_file else 0
    home = Tier.HOST if tier.is_file else tier
    memory = plan.budgets[home] - needed_nbytes(plan, home)
    shares = 2 if home is Tier.HOST and (tier.is_file or plan.uses_nvme) else 1
    window = min_nbytes + max(0, memory - min_nbytes) // shares // PAGE_NBYTES * PAGE_NBYTES
    expected = {name: dict(by_class) for name, by_class in plan.expected.items()}
    expected[home][StateClass.ACTIVATIONS] = window
    return replace(plan, expected=expected, activations=ActivationPlan(tier, window, disk))


def tuned(
    config: OffloadConfig, explicit: Placements, model: ModelShape, hardware: Hardware
) -> OffloadConfig:
    """Return `config` with chunk and prefetch chosen where they are auto."""
    chunk, prefetch = config.optimizer.chunk, config.prefetch
    if chunk != "auto" and prefetch != "auto":
        return config
    sizes = sizes_of(config)
    nbytes = [stored_nbytes(group, sizes.itemsize) for group in model.groups]
    if prefetch == "auto":
        config = config.model_copy(update={"prefetch": prefetch_depth(nbytes)})
    if chunk != "auto":
        return config
    trained = model.numel_trainable
    beside = sizes.record_nbytes(1 << 20) / (1 << 20) + sizes.gradient_itemsize if trained else 0.0
    budgets = resolve_budgets(config, hardware, 0)
    budget = budgets[Tier.HOST]
    named = list(explicit.values())
    is_open = len(named) < len(CLASSES)
    overflows = is_open and sum(nbytes) + trained * beside > budget
    if overflows or any(Tier.NVME in placement.tiers for placement in named):
        each = STAGING_BUFFERS * (sizes.itemsize + beside)
        numel = streamed_chunk(sum(nbytes), each, budget)
    else:
        copied = hardware.device_nbytes > 0 and any(Tier.DEVICE in each.tiers for each in named)
        smaller = min(budget, budgets[Tier.DEVICE])
        numel = chunk_in_memory(hardware.cores, smaller if copied else None)
    while numel < _min_chunk(model):
        numel *= 2
    optimizer = config.optimizer.model_copy(update={"chunk": numel})
    return config.model_copy(update={"optimizer": optimizer})


def _min_chunk(model: ModelShape) -> int:
    """Return the fewest elements per chunk with which the model has at most MAX_RECORDS records."""
    return -(-sum(group.layout.shard_trainable for group in model.groups) // MAX_RECORDS)


def _check_records(config: OffloadConfig, model: ModelShape) -> None:
    min_numel = _min_chunk(model) // 2
    if config.optimizer.chunk != "auto" and config.chunk_numel < min_numel:
        raise ConfigError(
            f"optimizer.chunk: {config.chunk_numel:,} elements cut this model into more than "
            f"{2 * MAX_RECORDS:,} records; write auto, or {min_numel:,} at least"
        )


def resolve_budgets(
    config: OffloadConfig, hardware: Hardware, on_cpu_device: int
) -> dict[Tier, int]:
    """Return the budget of each tier in bytes. `on_cpu_device` is the automatic device budget on a
    machine without a GPU."""
    gpu_nbytes = hardware.device_nbytes
    whole = {**hardware.capacities, Tier.DEVICE: gpu_nbytes or hardware.host_nbytes}
    free = hardware.host_free_nbytes
    left = free - reserve_nbytes(free)
    if not gpu_nbytes:  # a share of RAM is left to activations, whose size is not known here
        left = min(left, int(free * _BESIDE_ACTIVATIONS))
    auto = {
        **whole,
        Tier.DEVICE: int(gpu_nbytes * 0.8) if gpu_nbytes else on_cpu_device,
        Tier.HOST: left,
        Tier.NVME: int(hardware.nvme_free_nbytes * 0.9),
    }
    return {tier: resolve(config.budget.of(tier), whole[tier], auto[tier]) for tier in TIERS}


def within_gpu_budget(config: OffloadConfig, hardware: Hardware) -> Hardware:
    """Return `hardware` with no more GPU memory than budget.gpu, if it is given, leaves beside what
    this process's tensors take. Raise ConfigError without a GPU."""
    if config.budget.gpu is None or hardware.gpu_budget_nbytes is not None:
        return hardware
    free = hardware.device_nbytes
    if not free:
        raise ConfigError("budget.gpu: the model computes on the CPU here; remove budget.gpu")
    budget = resolve(config.budget.gpu, free, free)
    # 0 would be no GPU
    left = max(PAGE_NBYTES, min(free, budget - hardware.device_held_nbytes))
    return replace(hardware, device_nbytes=left, gpu_budget_nbytes=budget)


def reserve_nbytes(free_nbytes: int) -> int:
    """Return the free RAM that an automatic budget.host leaves to other programs: 5 %, at least
    1 GiB, but no more than 30 %."""
    return int(min(0.3 * free_nbytes, max(1 << 30, 0.05 * free_nbytes)))


def resolve(given: int | Percent | None, whole: int, auto: int) -> int:
    if given is None:
        return auto
    return int(whole * given.fraction) if isinstance(given, Percent) else given


def explicit_placements(config: OffloadConfig) -> dict[StateClass, Placement]:
    """Return the placements that the configuration names."""
    homes = config.placement.homes()
    named = {each: homes[each] for each in CLASSES}
    return {each: placement for each, placement in named.items() if placement is not None}
