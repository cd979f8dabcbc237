"""Estimates the memory that other training systems need, by the formulas of their papers.

All systems are counted alike: a 16-bit parameter, its 16-bit gradient, and in fp32 a master, the
states of the optimizer and the gradient that the master is stepped with, 2 + 2 + 4 + 8 + 4 = 20
bytes with Adam (ZeRO-Infinity, arXiv 2104.07857, section 3; in fp32 throughout no master and one
gradient). `SYSTEMS` says where each of them lives, and which are cut up over all GPUs. Beside
these: the buffers of `_staging`, activations, 5 % that the allocator loses, and libraries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from offload.planning.activations.facts import ActivationFacts
from offload.planning.plan.estimate import MemoryClass
from offload.planning.plan.sizes import ITEMSIZE
from offload.tiers.tier import TIERS, Tier
from offload.tools.memest.estimate.result import Estimate
from offload.tools.memest.hardware.profiles import HardwareProfile
from offload.zero.groups.model_shape import ModelShape

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME

# Settings of DeepSpeed that its documentation gives as defaults, in elements.
BUCKET_NUMEL = 500_000_000  # reduce_bucket_size
LIVE_NUMEL = 1_000_000_000  # stage3_max_live_parameters
SWAP_BUFFERS, SWAP_BUFFER_NUMEL = 5, 100_000_000  # offload_param.buffer_count and buffer_size
UPDATE_BUFFERS, UPDATE_NUMEL = 4, 1_000_000_000  # offload_optimizer.buffer_count, sub_group_size
# Memory that a caching allocator holds unused; ZeRO's paper saw up to 30 % (section 3.2).
FRAGMENTATION = 0.05


@dataclass(frozen=True)
class System:
    """A training system: where states live, and which of them each GPU has only a shard of."""

    name: str
    home: Tier  # of parameters and gradients
    states_home: Tier  # of the fp32 gradient, the master and the optimizer's states
    shared: str  # of parameters, gradients and states: their first letters
    fp32_parameters: bool = False  # the master is the parameter
    keeps_gradients: bool = True  # 16-bit ones; else they leave as they are made
    gathers_modules: bool = False  # parameters are whole only while they are used


SYSTEMS = (
    System("DDP", DEVICE, DEVICE, ""),
    System("ZeRO-1", DEVICE, DEVICE, "s"),  # 1910.02054, section 5
    System("ZeRO-2", DEVICE, DEVICE, "gs"),
    System("ZeRO-3", DEVICE, DEVICE, "pgs", gathers_modules=True),
    System("FSDP", DEVICE, DEVICE, "pgs", fp32_parameters=True),  # 2304.11277
    System("FSDP, cpu offload", HOST, HOST, "pgs", fp32_parameters=True),
    System("ZeRO-Offload", DEVICE, HOST, "s", keeps_gradients=False),  # 2101.06840, section 3
    System("ZeRO-Infinity, cpu", HOST, HOST, "pgs", gathers_modules=True),  # 2104.07857
    System("ZeRO-Infinity, nvme", NVME, NVME, "pgs", gathers_modules=True),
)
OFFLOAD = "offload"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model in training on one of several GPUs. Parameters are counted in elements of the whole
    model, activations in bytes of one GPU."""

    numel: int
    numel_trainable: int
    block_numel: int  # most parameters that one unit and an enclosing root gather at a time
    operator_numel: int  # of the largest weight
    saved_nbytes: int = 0  # activations that autograd holds when forward ends
    working_nbytes: int = 0  # activations beside them, at most
    recomputed: bool = True  # blocks are recomputed: their inputs are saved
    itemsize: int = 2  # of a parameter and its gradient
    state_itemsize: int = 8  # of the optimizer's states of one parameter
    ranks: int = 1  # GPUs of the run

    def part(self, numel: int, *, shared: bool) -> int:
        """Return the elements that one GPU has of `numel`: an even shard, or all."""
        return -(-numel // self.ranks) if shared else numel


def memory_of(system: System, subject: Subject) -> Counter[Tier]:
    """Return the bytes that one rank holds by place, without libraries.

    ZeRO-Infinity keeps the inputs of recomputed blocks in RAM (2104.07857, section 5.1.2).
    """
    held = states_of(system, subject) + _staging(system, subject)
    leaves = system.gathers_modules and system.home is not DEVICE and subject.recomputed
    held[HOST if leaves else DEVICE] += subject.saved_nbytes
    held[DEVICE] += subject.working_nbytes
    for tier in (DEVICE, HOST):
        held[tier] += int(held[tier] * FRAGMENTATION)
    return held


def states_of(system: System, subject: Subject) -> Counter[Tier]:
    """Return the bytes of parameters, gradients and states that one rank holds by place."""
    kept = subject.part(subject.numel, shared="p" in system.shared)
    made = subject.part(subject.numel_trainable, shared="g" in system.shared)
    stepped = subject.part(subject.numel_trainable, shared="s" in system.shared)
    itemsize = 4 if system.fp32_parameters else subject.itemsize
    held = Counter({system.home: itemsize * kept})
    if system.keeps_gradients:
        held[system.home] += itemsize * made
    in_states = subject.state_itemsize
    # ZeRO-Offload has an fp32 copy of fp32 weights in RAM, too
    if itemsize < 4 or system.home is not system.states_home:
        in_states += 4 + 4
    held[system.states_home] += in_states * stepped
    return held


def _staging(system: System, subject: Subject) -> Counter[Tier]:
    """Return the buffers of a system, and the parameters that it gathers for the work at hand."""
    itemsize, trained = subject.itemsize, subject.numel_trainable
    bucket = min(BUCKET_NUMEL, trained)  # through which gradients are reduced, and leave
    if system.fp32_parameters:  # 2304.11277: at most two gathers in flight, with their gradients
        return Counter({DEVICE: itemsize * 2 * 2 * subject.block_numel})
    if not system.gathers_modules:
        if not system.shared:  # DDP with `gradient_as_bucket_view=False`, the default
            bucket = trained if subject.ranks > 1 else 0
        return Counter({DEVICE: itemsize * bucket})
    # gathered module by module, some kept for reuse; the largest weight and its gradient whole
    # (2104.07857, section 3, model state working memory)
    largest = subject.operator_numel
    live = max(largest, min(LIVE_NUMEL, subject.numel))
    held = Counter({DEVICE: itemsize * (live + largest + bucket)})
    if system.home is NVME:  # pinned, for parameters and one group of the update
        shard = subject.part(subject.numel, shared=True)
        swap = min(shard, max(SWAP_BUFFER_NUMEL, subject.part(largest, shared=True)))
        update = min(subject.part(trained, shared=True), UPDATE_NUMEL)
        held[HOST] += SWAP_BUFFERS * itemsize * swap + UPDATE_BUFFERS * 4 * update
    return held


@dataclass(frozen=True)
class Row:
    """One system: the bytes of one GPU, of one node's RAM, of one node's disks."""

    name: str
    peaks: Mapping[Tier, int]
    full: tuple[Tier, ...]  # places that cannot hold their part


def compare(
    model: ModelShape, facts: ActivationFacts, estimate: Estimate, profile: HardwareProfile
) -> list[Row]:
    """Compare all systems with offload, whose row is last. All have the model, batch, precision,
    recomputation and bytes of libraries of `estimate`, which `memest` made for one rank."""
    subject = subject_of(model, facts, estimate, profile.ranks)
    places = estimate.memory.places
    capacities = capacities_of(profile)
    rows = []
    for system in SYSTEMS:
        held = memory_of(system, subject)
        for tier, place in places.items():
            held[tier] += place.by_class.get(MemoryClass.FRAMEWORK, 0)
        if DEVICE not in places:  # the model computes in RAM
            held[HOST] += held.pop(DEVICE)
        peaks = _of_a_node(held, profile)
        full = tuple(tier for tier, nbytes in peaks.items() if nbytes > capacities[tier])
        rows.append(Row(system.name, peaks, full))
    own = {tier: place.peak_nbytes for tier, place in places.items()}
    short = tuple(dict.fromkeys(shortfall.tier for shortfall in estimate.shortfalls))
    return [*rows, Row(OFFLOAD, _of_a_node(own, profile), short)]


def capacities_of(profile: HardwareProfile) -> dict[Tier, int]:
    """Return what there is of each place in a node, as offload's planner counts it."""
    return {tier: tier.capacity_nbytes for tier in TIERS} | {
        DEVICE: profile.gpu_free_nbytes,
        HOST: profile.usable_ram_nbytes,
        NVME: profile.nvme_nbytes,
    }


def _of_a_node(held: Mapping[Tier, int], profile: HardwareProfile) -> dict[Tier, int]:
    """Return the bytes of one rank as those of a GPU, and of a node's RAM and disks, which all
    ranks of the node fill together."""
    return {
        tier: nbytes if tier is DEVICE else nbytes * profile.ranks_per_node
        for tier, nbytes in held.items()
    }


def subject_of(
    model: ModelShape, facts: ActivationFacts, estimate: Estimate, ranks: int
) -> Subject:  # fmt: skip
    """Return the sizes of a model's shape on one rank, and of one forward and backward pass."""
    numels = [group.numel for group in model.groups]
    root = sum(numels[index] for unit in model.units if not unit.name for index in unit.groups)
    units: list[int] = []  # others gather a block with its experts
    for unit in model.units:
        own = sum(numels[index] for index in unit.groups)
        if unit.table and units:
            units[-1] += own
        elif unit.name:
            units.append(own)
    weights: Counter[str] = Counter()  # rows of one packed parameter together
    for group in model.groups:
        for param in group.params:
            name = param.names[0]
            weights[name.rpartition("[")[0] if group.packed else name] += param.numel
    config = estimate.config
    return Subject(
        numel=model.numel,
        numel_trainable=model.numel_trainable,
        block_numel=root + max(units, default=0),
        operator_numel=max(weights.values(), default=0),
        saved_nbytes=facts.saved_nbytes,
        working_nbytes=max(0, facts.peak_nbytes - facts.saved_nbytes),
        recomputed=config.placement.activations.checkpoint is True,
        itemsize=ITEMSIZE[config.precision],
        state_itemsize=4 * len(config.optimizer.state_names),
        ranks=ranks,
    )
