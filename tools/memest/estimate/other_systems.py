"""What a model would need under other training systems, by the formulas of their papers.

All systems are counted alike: a 16-bit parameter, its 16-bit gradient, and in fp32 a master, the
states of the optimizer and the gradient that the master is stepped with, 2 + 2 + 4 + 8 + 4 = 20
bytes with Adam (ZeRO-Infinity, arXiv 2104.07857, section 3; in fp32 throughout no master and one
gradient). Where each of them lives, and over how many GPUs it is cut up:

                      parameter     gradient      fp32 gradient, master, states
    DDP               each GPU      each GPU      each GPU
    ZeRO-1            each GPU      each GPU      shared by all          1910.02054, section 5
    ZeRO-2            each GPU      shared        shared
    ZeRO-3            shared        shared        shared
    FSDP              shared: fp32 parameters, gradients and states, no other master  2304.11277
    ZeRO-Offload      each GPU      -             shared, in RAM         2101.06840, section 3
    ZeRO-Infinity     shared, in RAM or on nvme                          2104.07857, sections 3, 5

Beside these: the buffers of `_staging`, activations, 5 % that the allocator loses, and libraries.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from offload.planning.activations.facts import ActivationFacts
from offload.planning.plan.estimate import Estimate, PlaceEstimate
from offload.planning.plan.estimate import MemoryClass as M
from offload.planning.plan.sizes import ITEMSIZE
from offload.tiers.tier import Tier
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

Held = dict[Tier, Counter[M]]


class System(enum.StrEnum):
    """A training system, in the order of the comparison."""

    DDP = "DDP"
    ZERO1 = "ZeRO-1"
    ZERO2 = "ZeRO-2"
    ZERO3 = "ZeRO-3"
    FSDP = "FSDP"
    FSDP_CPU = "FSDP, cpu offload"
    ZERO_OFFLOAD = "ZeRO-Offload"
    INFINITY_CPU = "ZeRO-Infinity, cpu"
    INFINITY_NVME = "ZeRO-Infinity, nvme"
    OURS = "offload"


OTHERS = tuple(system for system in System if system is not System.OURS)


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
    expert_numel: int = 0  # of `numel`, parameters that expert parallelism spreads
    itemsize: int = 2  # of a parameter and its gradient
    state_itemsize: int = 8  # of the optimizer's states of one parameter
    ranks: int = 1  # GPUs of the run
    ep_size: int = 1  # GPUs that the experts are spread over

    @property
    def full_itemsize(self) -> int:
        """The bytes per element of an fp32 copy beside 16-bit parameters; 0 if they are fp32."""
        return 4 if self.itemsize < 4 else 0

    def part(self, numel: int, *, shared: bool) -> int:
        """Return the elements that one GPU has of `numel`: an even shard, or all that are dense and
        its own experts."""
        if shared:
            return -(-numel // self.ranks)
        experts = self.expert_numel * numel // max(1, self.numel)
        return numel - experts - (-experts // self.ep_size)


@dataclass(frozen=True)
class _Homes:
    """The homes of a system's states; each GPU has a shard of those that are `shared`."""

    parameters: Tier
    gradients: Tier | None  # None: they leave as they are made
    states: Tier
    shared: str  # of parameters, gradients and states: their first letters


_HOMES = {
    System.DDP: _Homes(DEVICE, DEVICE, DEVICE, ""),
    System.ZERO1: _Homes(DEVICE, DEVICE, DEVICE, "s"),
    System.ZERO2: _Homes(DEVICE, DEVICE, DEVICE, "gs"),
    System.ZERO3: _Homes(DEVICE, DEVICE, DEVICE, "pgs"),
    System.FSDP: _Homes(DEVICE, DEVICE, DEVICE, "pgs"),
    System.FSDP_CPU: _Homes(HOST, HOST, HOST, "pgs"),  # `CPUOffloadPolicy`
    System.ZERO_OFFLOAD: _Homes(DEVICE, None, HOST, "s"),
    System.INFINITY_CPU: _Homes(HOST, HOST, HOST, "pgs"),
    System.INFINITY_NVME: _Homes(NVME, NVME, NVME, "pgs"),
}
_FSDP = (System.FSDP, System.FSDP_CPU)
_INFINITY = (System.INFINITY_CPU, System.INFINITY_NVME)


def memory_of(system: System, subject: Subject) -> Held:
    """Return the bytes that one rank holds by class, without libraries. Not for `System.OURS`,
    which the planner counts.

    ZeRO-Infinity keeps the inputs of recomputed blocks in RAM (2104.07857, section 5.1.2).
    """
    held: Held = {tier: Counter() for tier in Tier}
    _states(held, system, subject)
    _staging(held, system, subject)
    leaves = system in _INFINITY and subject.recomputed
    held[HOST if leaves else DEVICE][M.ACTIVATIONS] += subject.saved_nbytes
    held[DEVICE][M.ACTIVATIONS] += subject.working_nbytes
    for tier in (DEVICE, HOST):
        held[tier][M.FRAGMENTATION] += int(held[tier].total() * FRAGMENTATION)
    return held


def _states(held: Held, system: System, subject: Subject) -> None:
    homes, trained = _HOMES[system], subject.numel_trainable
    kept = subject.part(subject.numel, shared="p" in homes.shared)
    made = subject.part(trained, shared="g" in homes.shared)
    stepped = subject.part(trained, shared="s" in homes.shared)
    full = subject.full_itemsize
    if system in _FSDP:  # with a `MixedPrecisionPolicy`: the fp32 parameter is the master
        held[homes.parameters][M.MASTER if full else M.PARAMETERS] += 4 * kept
        held[homes.parameters][M.GRADIENTS] += 4 * made
        full = 0
    else:
        held[homes.parameters][M.PARAMETERS] += subject.itemsize * kept
        if homes.gradients is not None:
            held[homes.gradients][M.GRADIENTS] += subject.itemsize * made
    if system is System.ZERO_OFFLOAD:  # in RAM there is an fp32 copy of fp32 weights, too
        full = 4
    held[homes.states][M.GRADIENTS] += full * stepped
    held[homes.states][M.MASTER] += full * stepped
    held[homes.states][M.OPTIMIZER] += subject.state_itemsize * stepped


def _staging(held: Held, system: System, subject: Subject) -> None:
    """Count the buffers of a system, and the parameters that it gathers for the work at hand."""
    itemsize = subject.itemsize
    trained = subject.part(subject.numel_trainable, shared=False)
    bucket = min(BUCKET_NUMEL, trained)
    if system is System.DDP:  # `gradient_as_bucket_view=False`, the default
        on_device = trained if subject.ranks > 1 else 0
    elif system in _FSDP:  # 2304.11277: at most two gathers in flight, with their gradients
        on_device = 2 * 2 * subject.block_numel
    elif system in (System.ZERO3, *_INFINITY):
        # gathered module by module, some kept for reuse; the largest weight and its gradient whole
        # (2104.07857, section 3, model state working memory)
        largest = subject.operator_numel
        on_device = max(largest, min(LIVE_NUMEL, subject.numel)) + largest + bucket
    else:  # the bucket through which gradients are reduced, and leave
        on_device = bucket
    held[DEVICE][M.STAGING] += itemsize * on_device
    if system is System.INFINITY_NVME:  # pinned, for parameters and one group of the update
        shard = subject.part(subject.numel, shared=True)
        largest = subject.part(subject.operator_numel, shared=True)
        swap = min(shard, max(SWAP_BUFFER_NUMEL, largest))
        update = min(subject.part(subject.numel_trainable, shared=True), UPDATE_NUMEL)
        held[HOST][M.STAGING] += SWAP_BUFFERS * itemsize * swap + UPDATE_BUFFERS * 4 * update


@dataclass(frozen=True)
class Row:
    """One system. `places`: the bytes of one GPU, of one node's RAM, of one node's disks."""

    system: System
    places: Mapping[Tier, PlaceEstimate]
    full: tuple[Tier, ...]  # places that cannot hold their part

    @property
    def fits(self) -> bool:
        return not self.full


def compare(
    model: ModelShape, facts: ActivationFacts, ours: Estimate, profile: HardwareProfile
) -> list[Row]:
    """Compare all systems with the model, batch, precision and recomputation of `ours`, which comes
    last.

    `ours`: the estimate of `memest` for one rank; its bytes for libraries are used for every
    system. `model`: one rank's part, with experts spread over as many ranks as those of `ours`.
    """
    subject = subject_of(model, facts, ours, profile.ranks)
    rows = []
    for system in OTHERS:
        held = memory_of(system, subject)
        for tier, place in ours.memory.places.items():
            held[tier][M.FRAMEWORK] = place.by_class.get(M.FRAMEWORK, 0)
        if DEVICE not in ours.memory.places:  # the model computes in RAM
            held[HOST] += held.pop(DEVICE)
        places = _of_a_node(held, profile)
        full = tuple(t for t, p in places.items() if p.peak_nbytes > p.capacity_nbytes)
        rows.append(Row(system, places, full))
    own = {tier: place.by_class for tier, place in ours.memory.places.items()}
    short = tuple(dict.fromkeys(shortfall.tier for shortfall in ours.shortfalls))
    return [*rows, Row(System.OURS, _of_a_node(own, profile), short)]


def subject_of(
    model: ModelShape, facts: ActivationFacts, ours: Estimate, ranks: int
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
    config = ours.config
    return Subject(
        numel=model.numel_of_all_ranks,
        numel_trainable=sum(
            group.ep_size * param.numel
            for group in model.groups
            for param in group.params
            if param.trainable
        ),
        expert_numel=sum(g.ep_size * g.numel for g in model.groups if g.ep_size > 1),
        block_numel=root + max(units, default=0),
        operator_numel=max(weights.values(), default=0),
        saved_nbytes=facts.saved_nbytes,
        working_nbytes=max(0, facts.peak_nbytes - facts.saved_nbytes),
        recomputed=config.placement.activations.checkpoint is True,
        itemsize=ITEMSIZE[config.precision],
        state_itemsize=4 * len(config.optimizer.state_names),
        ranks=ranks,
        ep_size=1 if ours.experts is None else ours.experts.ep_size,
    )


def _of_a_node(
    held: Mapping[Tier, Mapping[M, int]], profile: HardwareProfile
) -> dict[Tier, PlaceEstimate]:
    """Return the bytes of one rank as those of a GPU, and of a node's RAM and disks, which all
    ranks of the node fill together. Capacities are those of offload's planner."""
    capacities = {
        DEVICE: profile.gpu_free_nbytes,
        HOST: profile.usable_ram_nbytes,
        NVME: profile.nvme_nbytes,
    }
    places = {}
    for tier, by_class in held.items():
        times = 1 if tier is DEVICE else profile.ranks_per_node
        there = {each: by_class.get(each, 0) * times for each in M}
        there = {each: nbytes for each, nbytes in there.items() if nbytes}
        places[tier] = PlaceEstimate(capacities[tier], there)
    return places
