"""Builds a plan from a placement of every class: bytes per tier, windows, buffers.

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
from offload.planning.plan.device_plan import plan_device
from offload.planning.plan.kv_plan import plan_kv
from offload.planning.plan.plan import Hardware, Plan, least_window, needed_nbytes, share_out
from offload.planning.plan.shared_plan import plan_shared
from offload.planning.plan.sizes import (
    CLASSES,
    EXPERTS_OF,
    PLACED,
    STAGING_BUFFERS,
    ExpertClass,
    GroupBytes,
    PlacedClass,
    Placements,
    class_of,
    decoded_window_of,
    gathered_unit,
    kinds_of,
    least_nbytes,
    measure,
    record_kinds,
    sizes_of,
    staging_nbytes_of,
    sums_nbytes_of,
    tiers_of,
    window_nbytes_of,
    with_records,
)
from offload.planning.plan.tuning import chunk_in_memory, prefetch_depth, streamed_chunk
from offload.planning.plan.upper_bounds import within_use
from offload.tiers.errors import ConfigError
from offload.tiers.ledger import StateClass
from offload.tiers.placement import Placement
from offload.tiers.tier import Tier
from offload.zero.groups.model_shape import SMALL_TABLE_NUMEL, ModelShape
from offload.zero.ranks.sharding import Sharding

if TYPE_CHECKING:
    from offload.config import OffloadConfig

_BESIDE_ACTIVATIONS = 0.7  # of free RAM for the tiers, where the batch is not known
MOST_RECORDS = 1 << 20  # that the chunk is chosen for: each is dealt out, one by one


class PlanBuilder:
    """Builds the plans of one model, one configuration and one machine, by placement."""

    def __init__(
        self, config: OffloadConfig, model: ModelShape, hardware: Hardware, *,
        device_is_open: bool = False,
    ) -> None:  # fmt: skip
        """`device_is_open`: the device budget is all that is left of a GPU, possibly more than is
        of use."""
        config = config.settled()
        sharding = hardware.sharding
        _check_experts(config, model, sharding)
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
        self._kinds = kinds_of(self.groups)  # of thousands of experts one
        self.budgets = resolve_budgets(config, hardware, self._device_demand())
        self.window_nbytes = window_nbytes_of(model, self.groups)
        self.decoded_window_nbytes = decoded_window_of(model, self.groups)
        self.unit_nbytes = gathered_unit(model, self.groups)
        several = self.config.micro_batches > 1
        self.sums_nbytes = sums_nbytes_of(model, self.groups) if several else 0
        self.shared = {  # by whether some parameters are at home elsewhere than where it computes
            moves: plan_shared(sharding, model, self.groups, self.config, moves=moves)
            for moves in (False, True)
        }
        self.kv = plan_kv(self.config, model, itemsize=self.sizes.itemsize, gpu=self.gpu)
        self._dealt: dict[tuple[Placement | None, ...], _DealtRecords] = {}  # of all asked for
        self._assigned: dict[tuple[StateClass, Placement, Placement | None], list[Tier]] = {}

    def share_with(self, other: PlanBuilder) -> None:
        """Reuse the record assignments of `other` if both have the same groups and sizes."""
        if self.groups == other.groups and self.sizes == other.sizes:
            self._dealt = other._dealt

    def build(self, placements: Placements) -> Plan:
        """Build the plan with every class where `placements` puts it, whether or not it fits."""
        parameters = self._assign(placements, StateClass.PARAMETERS)
        gradients = self._assign_gradients(placements)
        dealt = self._deal_records(placements)
        groups = dealt.groups
        staging = staging_nbytes_of(placements, self._kinds, self.sizes, self.gpu)
        computing = {Tier.DEVICE} if self.gpu else {Tier.DEVICE, Tier.HOST}
        moves = bool(tiers_of(placements, StateClass.PARAMETERS) - computing)
        plan = Plan(
            budgets=dict(self.budgets), groups=groups,
            placements={placed: placements[placed] for placed in PLACED if placed in placements},
            parameters=tuple(parameters), gradients=tuple(gradients), records=dealt.tiers,
            record_formats=self.sizes.record_formats, chunk_numel=self.sizes.chunk_numel,
            prefetch=self.sizes.prefetch, staging_buffers=STAGING_BUFFERS if staging else 0,
            staging_nbytes=staging, gpu=self.gpu, unit_nbytes=self.unit_nbytes,
            sums_nbytes=self.sums_nbytes, window_nbytes=self.window_nbytes,
            decoded_window_nbytes=self.decoded_window_nbytes, expected={},
            device=plan_device(
                placements, self._kinds, self.sizes, self.budgets[Tier.DEVICE],
                self.hardware.kernels_missing,
            ) if self.gpu else None,
            sharding=self.hardware.sharding, shared=self.shared[moves], kv=self.kv,
        )  # fmt: skip
        plan = replace(plan, expected=_expected(plan, dealt))
        if self._device_is_open:
            plan = within_use(plan)
        return _with_activations(plan, Tier(self.config.placement.activations.tier))

    def _assign(self, placements: Placements, state_class: StateClass) -> list[Tier]:
        """A tier per group; remembered, since compared placements often differ elsewhere only."""
        key = state_class, placements[state_class], placements.get(EXPERTS_OF[state_class])
        if key not in self._assigned:
            experts = self._assign_experts(key[2])
            rest = [
                getattr(group, state_class) for index, group in enumerate(self.groups)
                if index not in experts
            ]  # fmt: skip
            others = iter(key[1].assign(rest))
            self._assigned[key] = [
                experts[index] if index in experts else next(others)
                for index in range(len(self.groups))
            ]
        return self._assigned[key]

    def _assign_experts(self, placement: Placement | None) -> dict[int, Tier]:
        """A tier per expert, with equal shares of each table; empty if experts have no own home."""
        if placement is None:
            return {}
        pairs = (zip(t, placement.blocks(len(t)), strict=True) for t in self.model.tables.values())
        return dict(itertools.chain.from_iterable(pairs))

    def _device_demand(self) -> int:
        """The most bytes that explicit placements put into the device tier."""
        named = {class_of(placed) for placed in self.explicit}
        there = [name for name in named if Tier.DEVICE in tiers_of(self.explicit, name)]
        return sum(getattr(group, name) for name in there for group in self.groups)

    def _assign_gradients(self, placements: Placements) -> list[Tier]:
        assigned = self._assign(placements, StateClass.GRADIENTS)
        return [
            Tier.HOST if group.summed and tier is Tier.NVME else tier
            for group, tier in zip(self.groups, assigned, strict=True)
        ]

    def _deal_records(self, placements: Placements) -> _DealtRecords:
        """Assign records to tiers, once per placement: a large model has hundreds of thousands of
        records, and plans that are compared often differ in other classes only."""
        key = placements[StateClass.OPTIMIZER], placements.get(ExpertClass.OPTIMIZER)
        if key not in self._dealt:
            tiers = self._assign_records(*key)
            groups = tuple(
                with_records(group, each, self.sizes)
                for group, each in zip(self.groups, tiers, strict=True)
            )
            nbytes: dict[Tier, int] = defaultdict(int)
            for group, each in zip(groups, tiers, strict=True):
                if each and each.count(each[0]) == len(each):
                    nbytes[each[0]] += group.optimizer
                    continue
                for kind in record_kinds(group, each, self.sizes.chunk_numel):
                    nbytes[kind.tier] += kind.nbytes * kind.count
            self._dealt[key] = _DealtRecords(tiers, groups, nbytes)
        return self._dealt[key]

    def _assign_records(
        self, placement: Placement, of_experts: Placement | None
    ) -> tuple[tuple[Tier, ...], ...]:
        """Assign the records of all groups in one sequence, so that each tier's share holds across
        groups; an expert with a home of its own has all records there."""
        experts = self._assign_experts(of_experts)
        rest = (group for index, group in enumerate(self.groups) if index not in experts)
        flat = placement.assign([nbytes for group in rest for nbytes in group.records])
        records, start = [], 0
        for index, group in enumerate(self.groups):
            if index in experts:
                records.append((experts[index],) * len(group.records))
                continue
            stop = start + len(group.records)
            records.append(tuple(flat[start:stop]))
            start = stop
        return tuple(records)


@dataclass(frozen=True)
class _DealtRecords:
    """The optimizer's records in their tiers."""

    tiers: tuple[tuple[Tier, ...], ...]  # per group and chunk
    groups: tuple[GroupBytes, ...]  # with the bytes that records have there
    nbytes: Mapping[Tier, int]


def _expected(plan: Plan, dealt: _DealtRecords) -> dict[Tier, dict[StateClass, int]]:
    expected: dict[Tier, dict[StateClass, int]] = {tier: defaultdict(int) for tier in Tier}
    rows = zip(plan.groups, plan.parameters, plan.gradients, strict=True)
    for group, parameter, gradient in rows:
        expected[parameter][StateClass.PARAMETERS] += group.parameters
        expected[gradient][StateClass.GRADIENTS] += group.gradients
    for tier, nbytes in dealt.nbytes.items():
        expected[tier][StateClass.OPTIMIZER] += nbytes
    staging = plan.staging_nbytes * plan.staging_buffers
    computing = Tier.DEVICE if plan.gpu else Tier.HOST
    expected[Tier.HOST][StateClass.STAGING] += staging
    expected[computing][StateClass.STAGING] += plan.sums_nbytes
    if plan.device is not None:
        expected[Tier.DEVICE][StateClass.STAGING] += plan.device.total_nbytes
    if plan.kv is not None:
        for tier, nbytes in plan.kv.expected.items():
            expected[tier][StateClass.KV] += nbytes
    if plan.shared is not None:
        expected[computing][StateClass.STAGING] += plan.shared.total_nbytes
    return expected


def _with_activations(plan: Plan, tier: Tier) -> Plan:
    """Give activations what all other states leave of the budgets, or a share of it."""
    least = least_window(tier, plan.gpu)
    if not least:
        return plan
    expected = {name: dict(by_class) for name, by_class in plan.expected.items()}
    expected[Tier.HOST][StateClass.ACTIVATIONS] = least
    plan = replace(plan, expected=expected)
    left = {name: plan.budgets[name] - needed_nbytes(plan, name) for name in Tier}
    activations = share_out(tier, left[Tier.HOST], left[Tier.NVME], cached=plan.uses_nvme)
    expected[Tier.HOST][StateClass.ACTIVATIONS] = activations.window_nbytes
    return replace(plan, activations=activations)


def tuned(
    config: OffloadConfig, explicit: Placements, model: ModelShape, hardware: Hardware
) -> OffloadConfig:
    """Choose chunk and prefetch where `config` leaves them open."""
    chunk, prefetch = config.optimizer.chunk, config.prefetch
    if chunk != "auto" and prefetch != "auto":
        return config
    sizes = sizes_of(config)
    nbytes = [least_nbytes(group, sizes.itemsize) for group in model.groups]
    if prefetch == "auto":
        config = config.model_copy(update={"prefetch": prefetch_depth(nbytes)})
    if chunk != "auto":
        return config
    trained = model.numel_trainable
    beside = sizes.record_nbytes(1 << 20) / (1 << 20) + sizes.gradient_itemsize if trained else 0.0
    budget = resolve_budgets(config, hardware, 0)[Tier.HOST]
    named = list(explicit.values())
    is_open = len(named) < len(placed_classes(config))
    overflows = is_open and sum(nbytes) + trained * beside > budget
    if overflows or any(Tier.NVME in placement.tiers for placement in named):
        each = STAGING_BUFFERS * (sizes.itemsize + beside)
        numel = streamed_chunk(sum(nbytes), each, budget)
    else:
        threads = config.threads.optimizer
        copied = hardware.device_nbytes > 0 and any(Tier.DEVICE in each.tiers for each in named)
        cores = hardware.cores if threads == "auto" else threads
        numel = chunk_in_memory(cores, copied=copied)
    optimizer = config.optimizer.model_copy(update={"chunk": _few_enough(numel, model)})
    return config.model_copy(update={"optimizer": optimizer})


def _few_enough(chunk_numel: int, model: ModelShape) -> int:
    """Enlarge the chunk until the model has few enough records to assign one by one."""
    while _records(model, chunk_numel) > MOST_RECORDS:
        chunk_numel *= 2
    return chunk_numel


def _check_records(config: OffloadConfig, model: ModelShape) -> None:
    records = _records(model, config.chunk_numel)
    if config.optimizer.chunk != "auto" and records > 2 * MOST_RECORDS:
        raise ConfigError(
            f"optimizer.chunk: {config.chunk_numel:,} elements cut this model into {records:,} "
            f"records; at most {2 * MOST_RECORDS:,} are planned: write auto, or a larger chunk"
        )


def _records(model: ModelShape, chunk_numel: int) -> int:
    return sum(group.layout.shard_trainable // chunk_numel for group in model.groups)


def resolve_budgets(
    config: OffloadConfig, hardware: Hardware, on_cpu_device: int
) -> dict[Tier, int]:
    """Resolve the budget of each tier in bytes, as far as it does not depend on a placement.
    `on_cpu_device` is an automatic device budget on a CPU."""
    budget = config.budget
    device_auto = int(hardware.device_nbytes * 0.8) if hardware.device_nbytes else on_cpu_device
    device_whole = hardware.device_nbytes or hardware.host_nbytes
    return {
        Tier.DEVICE: _resolve(budget.device, device_whole, device_auto),
        Tier.HOST: _resolve(budget.host, hardware.host_nbytes, _host_auto(hardware)),
        Tier.NVME: _resolve(
            budget.nvme, hardware.nvme_free_nbytes, int(hardware.nvme_free_nbytes * 0.9)
        ),
    }


def _host_auto(hardware: Hardware) -> int:
    """The automatic host budget: free RAM without the reserve. On a CPU a share of RAM is left to
    activations, whose size is not known here."""
    free = hardware.host_free_nbytes
    left = free - reserve_nbytes(free)
    return left if hardware.device_nbytes else min(left, int(free * _BESIDE_ACTIVATIONS))


def reserve_nbytes(free_nbytes: int) -> int:
    """The free RAM that an open budget.host leaves to other programs: a twentieth, at least 1 GiB,
    but no more than three tenths."""
    return int(min(0.3 * free_nbytes, max(1 << 30, 0.05 * free_nbytes)))


def _resolve(given: int | Percent | None, whole: int, auto: int) -> int:
    if given is None:
        return auto
    return int(whole * given.fraction) if isinstance(given, Percent) else given


def placed_classes(config: OffloadConfig) -> tuple[PlacedClass, ...]:
    """The classes that have homes; experts have their own if the configuration says so."""
    return PLACED if config.placement.experts is not None else CLASSES


def explicit_placements(config: OffloadConfig) -> dict[PlacedClass, Placement]:
    """The homes of the classes for which the configuration names one."""
    homes = config.placement.homes()
    named = {placed: homes[placed] for placed in placed_classes(config)}
    return {each: placement for each, placement in named.items() if placement is not None}


def _check_experts(config: OffloadConfig, model: ModelShape, sharding: Sharding) -> None:
    if config.placement.experts is None or model.tables:
        return
    if not config.splits_experts(sharding.world_size):
        raise ConfigError(
            f"placement.experts: at zero.stage: {config.zero.stage} on {sharding.world_size} ranks "
            "all ranks gather the same parameters, whichever experts each of them chose: experts "
            "stay with their block; set zero.stage: 2 or less, or remove placement.experts"
        )
    raise ConfigError(
        "placement.experts: the model has no experts that move one by one: modules of one class in "
        "a list called experts, or parameters with a row per expert under transformers' default "
        f"implementation (grouped_mm), with more than {SMALL_TABLE_NUMEL:,} parameters per table; "
        "remove placement.experts"
    )
