"""A plan: budgets, homes and expected bytes, and the least that each tier must hold.

This arithmetic is shared by the runtime and the tools.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from offload.kernels.cpu.undo_code import codes_nbytes
from offload.kernels.floats import Float
from offload.planning.plan.sizes import (
    CLASSES,
    GroupBytes,
    Placements,
    pages,
    record_kinds,
    tiers_of,
)
from offload.tiers.ledger import OldBytes, StateClass
from offload.tiers.tier import PAGE_NBYTES, TIERS, Medium, Tier
from offload.tiers.units import format_bytes, round_up
from offload.zero.ranks.sharding import ALONE, Sharding
from offload.zero.step.records import RecordFormat

if TYPE_CHECKING:
    from offload.config import OffloadConfig
    from offload.planning.plan.buffers import DevicePlan, SharedPlan
    from offload.planning.plan.kv_plan import KVPlan

MIN_WINDOW_NBYTES = 8 << 20  # of activations: four pieces of 2 MiB on their way at a time
_BLOCK_NBYTES = 2 << 20  # what PyTorch's allocator takes of a GPU at a time, for large tensors
_SPARE_SHARE = 0.9  # of what nvme has beyond the plan: extents of many sizes leave gaps


@dataclass(frozen=True)
class Hardware:
    """Resources for a plan, in bytes; `device_nbytes` is 0 if the model computes on the CPU."""

    device_nbytes: int
    host_nbytes: int  # may ever be held (cgroup limits count)
    host_free_nbytes: int
    nvme_free_nbytes: int
    kernels_missing: str | None = None  # why offload's kernels cannot run on the device
    sharding: Sharding = ALONE  # of the rank that the rest is for
    cores: int = 1  # that the optimizer may use
    device_held_nbytes: int = 0  # by this process's tensors, beside `device_nbytes`
    gpu_budget_nbytes: int | None = None  # budget.gpu; `device_nbytes` is what is free of it

    @property
    def capacities(self) -> Mapping[Tier, int]:
        """The bytes that one rank has of each tier."""
        return {tier: tier.capacity_nbytes for tier in TIERS} | {
            Tier.DEVICE: self.device_nbytes, Tier.HOST: self.host_nbytes,
            Tier.NVME: self.nvme_free_nbytes,
        }  # fmt: skip


@dataclass(frozen=True)
class ActivationPlan:
    """The bytes for saved activations that leave the device. How many there will be depends on the
    batch, which is not known before the first step: they get what the other states leave."""

    tier: Tier
    window_nbytes: int  # of memory: their home, or what they pass through
    disk_nbytes: int  # most that lies on nvme at a time

    @property
    def window_tier(self) -> Tier:
        """The tier of memory that the window is in."""
        return Tier.HOST if self.tier.is_file else self.tier


def min_window(tier: Tier, gpu: bool) -> int:
    """The least memory for activations with their home in `tier`; 0 if they stay in place.

    Where the model computes in host memory, the host tier is the same place as the device.
    """
    away = not tier.on_device and (gpu or tier is not Tier.HOST)
    return MIN_WINDOW_NBYTES if away else 0


@dataclass(frozen=True)
class Plan:
    """A placement with its bytes. Tiers are per group (records: per group and chunk)."""

    budgets: Mapping[Tier, int]
    placements: Placements
    groups: tuple[GroupBytes, ...]
    parameters: tuple[Tier, ...]
    gradients: tuple[Tier, ...]
    records: tuple[tuple[Tier, ...], ...]
    homes: Mapping[StateClass, Mapping[Tier, int]]  # bytes at home of each placed class
    record_format: RecordFormat
    chunk_numel: int
    prefetch: int
    staging_buffers: int
    staging_nbytes: int  # of one buffer
    gpu: bool  # the device tier is GPU memory: parameters are copied there
    unit_nbytes: int  # largest parameters that are gathered at the same time
    window_nbytes: int  # least memory for copies of what lives on nvme
    dequantized_nbytes: int  # least memory for dequantized values; 0: nothing is quantized
    expected: Mapping[Tier, Mapping[StateClass, int]]  # at home, staging included
    activations: ActivationPlan | None = None  # None: they stay on the device
    device: DevicePlan | None = None  # None: no offload kernel runs on a device
    sharding: Sharding = ALONE  # of the rank that it is for
    shared: SharedPlan | None = None  # None: this rank is alone
    kv: KVPlan | None = None  # None: KV caches are in no tier
    products: tuple[str, int] = ("bf16", 0)  # of Muon: their format, and iterations
    products_nbytes: tuple[int, int] = (0, 0)  # where the model computes, and on the host beside it
    gpu_budget_nbytes: int | None = None  # for the tier and all beside it; None: it is open
    device_room_nbytes: int | None = None  # where budget.device is open: with what it cannot use

    def room_nbytes(self, tier: Tier) -> int:
        """The capacity of a tier: its budget, and on a GPU also what the plan cannot use."""
        if tier is Tier.DEVICE and self.device_room_nbytes is not None:
            return self.device_room_nbytes
        return self.budgets[tier]

    def total(self, tier: Tier) -> int:
        return sum(self.expected[tier].values())

    @cached_property
    def trains(self) -> bool:
        """Whether anything is trained; otherwise a step is a pass of inference."""
        return any(group.layout.numel_trainable for group in self.groups)

    @property
    def uses_nvme(self) -> bool:
        return self.total(Tier.NVME) > 0

    @property
    def copies_on_host(self) -> bool:
        """Whether host memory holds copies beside the states at home there: of states on nvme and,
        if the model computes on the CPU, of quantized weights."""
        return self.uses_nvme or (self.dequantized_nbytes > 0 and not self.gpu)

    @property
    def opens_files(self) -> bool:
        """Whether anything may go to nvme, including activations of unknown size."""
        return self.uses_nvme or (self.activations is not None and self.activations.disk_nbytes > 0)


def kv_room_nbytes(plan: Plan, tier: Tier) -> int:
    """The part of a tier's budget that everything else leaves to KV caches."""
    others = needed_nbytes(plan, tier) - plan.expected[tier].get(StateClass.KV, 0)
    return max(0, plan.budgets[tier] - others)


def needed_nbytes(plan: Plan, tier: Tier) -> int:
    """The least bytes that a tier has to hold at the same time."""
    return sum(nbytes for _, nbytes in _needs(plan, tier))


def ram_nbytes(plan: Plan) -> int:
    """The RAM that tiers need: host's and, if the model computes on a CPU, device's."""
    device = 0 if plan.gpu else needed_nbytes(plan, Tier.DEVICE)
    return needed_nbytes(plan, Tier.HOST) + device


def breakdown(plan: Plan, tier: Tier) -> str:
    """The terms of `needed_nbytes` as text: `parameters 1.9 GiB + staging 1.1 MiB`."""
    terms = [f"{name} {format_bytes(nbytes)}" for name, nbytes in _needs(plan, tier) if nbytes]
    return " + ".join(terms) or "nothing"


def _needs(plan: Plan, tier: Tier) -> Iterator[tuple[str, int]]:
    yield from plan.expected[tier].items()
    if tier is Tier.HOST and plan.copies_on_host:
        yield "window", host_window(plan)
    if tier is Tier.DEVICE:
        yield "parameters of the unit that runs", gathered_nbytes(plan)
    if tier is Tier.NVME and plan.uses_nvme:
        yield "new versions", nvme_slack(plan)


def gathered_nbytes(plan: Plan) -> int:
    """GPU memory for the parameters of a running unit that live elsewhere."""
    elsewhere = plan.gpu and (set(plan.parameters) != {Tier.DEVICE} or plan.dequantized_nbytes)
    return plan.unit_nbytes if elsewhere else 0


def mirrors_nbytes(plan: Plan) -> int:
    """GPU memory for copies of all parameters that live elsewhere, and values of quantized ones."""
    pairs = zip(plan.groups, plan.parameters, strict=True)
    elsewhere = sum(group.parameters for group, home in pairs if home is not Tier.DEVICE)
    return elsewhere + sum(group.dequantized for group in plan.groups)


def device_upper_bound(plan: Plan) -> int:
    """The most bytes of GPU memory in use, rounded up to PyTorch's allocation size.

    It holds the states at home there, mirrors of all others, and one unit once more, since copies
    that come and go leave holes. Gradients that are planned in 16 bits become fp32 sums if a step
    has a second pass; a sum that begins is beside the first gradient."""
    sums = 0
    for group, home in zip(plan.groups, plan.gradients, strict=True):
        summed = pages(group.layout.shard_trainable * 4)
        if home.on_device and summed > group.gradients:  # else they are planned as sums
            sums += summed
    max_nbytes = plan.total(Tier.DEVICE) + mirrors_nbytes(plan) + sums + gathered_nbytes(plan)
    return round_up(max_nbytes, _BLOCK_NBYTES)


def host_window(plan: Plan) -> int:
    """The least memory for copies of states on nvme or stored quantized."""
    on_nvme = {c for c in CLASSES if Tier.NVME in tiers_of(plan.placements, c)}
    if StateClass.PARAMETERS in on_nvme or StateClass.GRADIENTS in on_nvme:
        return plan.window_nbytes
    records = StateClass.OPTIMIZER in on_nvme
    record = max((max(g.records, default=0) for g in plan.groups), default=0) if records else 0
    return record + (0 if plan.gpu else plan.dequantized_nbytes)


def ahead_nbytes(plan: Plan, tier: Tier) -> int:
    """Memory of a tier for reading ahead, beside its needs, in a model that does not train. (When a
    model trains, updates bring weights, too, and the time decides what is worth more.)"""
    computing = Tier.DEVICE if plan.gpu else Tier.HOST
    if tier not in (computing, Tier.HOST) or plan.trains:
        return 0
    pairs = zip(plan.groups, plan.parameters, strict=True)
    coming = (group.parameters for group, home in pairs if home in tier.slower)
    return plan.prefetch * max(coming, default=0)


def spare_host_nbytes(plan: Plan) -> int:
    """The host budget that is left if all parameters and gradients on nvme have copies there;
    negative if they do not fit."""
    nvme = plan.expected[Tier.NVME]
    copies = nvme.get(StateClass.PARAMETERS, 0) + nvme.get(StateClass.GRADIENTS, 0)
    return plan.budgets[Tier.HOST] - needed_nbytes(plan, Tier.HOST) - copies


def spare_nbytes(plan: Plan) -> OldBytes:
    """The budgets that are left for old versions of groups that are updated speculatively."""
    saved = 0 if plan.activations is None else plan.activations.disk_nbytes
    left = plan.budgets[Tier.NVME] - needed_nbytes(plan, Tier.NVME) - saved
    memory = plan.budgets[Tier.HOST] - needed_nbytes(plan, Tier.HOST)
    return OldBytes(max(0, int(left * _SPARE_SHARE)), max(0, memory))


def speculative_groups(plan: Plan, config: OffloadConfig) -> Mapping[int, OldBytes]:
    """The groups that a step without clipping and skipping updates during its backward
    (zero/step/speculative_updates.py), and the bytes of their old versions."""
    if config.optimizer.in_backward is True:
        return {}
    on_all_ranks = plan.sharding.world_size > 1 and not plan.sharding.parameters
    # a CPU that computes has no time to spare for records that it need not wait for
    has_codes = plan.gpu and plan.record_format.can_undo(Float[config.precision.upper()])
    speculative, left = {}, spare_nbytes(plan)
    for index in range(len(plan.groups) - 1, -1, -1):  # as backward comes to them
        group, home, tiers = plan.groups[index], plan.parameters[index], plan.records[index]
        coded = {t for t in tiers if has_codes and t.medium is Medium.HOST and not group.matrices}
        moves = bool(tiers) or home is Tier.NVME
        on_host = home.medium is Medium.HOST and not on_all_ranks
        can_be_undone = {*tiers} <= {Tier.NVME, *coded} and (home is Tier.NVME or on_host)
        if not moves or not can_be_undone or group.dequantized:
            continue
        old = _old_nbytes(plan, index, coded)
        if group.layout.numel_trainable and left.holds(old):
            speculative[index] = old
            left = left - old
    return speculative


def _old_nbytes(plan: Plan, index: int, coded: Collection[Tier]) -> OldBytes:
    """The bytes of a group's old versions: codes of records in the tiers of `coded`, all of the
    others, and of the weights if there are others."""
    group, tiers = plan.groups[index], plan.records[index]
    pieces = len(group.trained_numels)
    codes = sum(
        kind.count * pages(codes_nbytes(kind.numel, pieces))
        for kind in record_kinds(group, tiers, plan.chunk_numel) if kind.tier in coded
    )  # fmt: skip
    if tiers and {*tiers} <= {*coded}:
        return OldBytes(memory=codes)
    files = sum(
        nbytes + 2 * PAGE_NBYTES
        for nbytes, tier in zip(group.records, tiers, strict=True) if tier not in coded
    )  # fmt: skip
    if plan.parameters[index] is Tier.NVME:
        return OldBytes(files + group.parameters + PAGE_NBYTES, codes)
    return OldBytes(files, codes + group.parameters)


def nvme_slack(plan: Plan) -> int:
    """Room for extents whose new version is written while the old one is still valid; 0 if nothing
    is trained."""
    if not plan.trains:
        return 0
    largest = max((g.parameters + g.gradients for g in plan.groups), default=0)
    return 2 * largest + plan.staging_buffers * plan.staging_nbytes
