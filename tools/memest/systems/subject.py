"""The facts that the memory of every system depends on: a model, its ranks, and the machine's
room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from offload.planning.activations.facts import ActivationFacts
from offload.planning.plan.estimate import MemoryClass, PlaceEstimate
from offload.tiers.tier import Tier
from offload.tools.memest.hardware.profiles import HardwareProfile
from offload.zero.groups.model_shape import ModelShape


@dataclass(frozen=True)
class Subject:
    """A model with a batch. Activations are in bytes, of one GPU; parameters are counted whole."""

    numel: int
    numel_trainable: int
    block_numel: int  # most parameters that one unit and an enclosing root gather at a time
    operator_numel: int  # of the largest weight
    saved_nbytes: int  # activations that autograd holds when forward ends
    working_nbytes: int  # activations beside them, at most
    recomputed: bool  # blocks are recomputed: their inputs are saved
    expert_numel: int = 0  # of `numel`, parameters that expert parallelism spreads

    @property
    def activation_nbytes(self) -> int:
        return self.saved_nbytes + self.working_nbytes


@dataclass(frozen=True)
class Ranks:
    """GPUs of one run. `tensor`: GPUs that one copy of the dense parameters is cut over,
    `experts`: GPUs that the experts are spread over."""

    per_node: int = 1
    nodes: int = 1
    tensor: int = 1
    experts: int = 1

    @property
    def count(self) -> int:
        return self.per_node * self.nodes

    @property
    def data(self) -> int:
        """The copies of the dense parameters that plain data parallelism keeps."""
        return max(1, self.count // self.tensor)


def subject_of(model: ModelShape, facts: ActivationFacts, *, recomputed: bool) -> Subject:
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
            weights[param.names[0].rpartition("[")[0] if group.packed else param.names[0]] += (
                param.numel
            )
    return Subject(
        numel=model.numel_of_all_ranks,
        numel_trainable=sum(
            group.ep_size * param.numel
            for group in model.groups for param in group.params if param.trainable
        ),
        expert_numel=sum(g.ep_size * g.numel for g in model.groups if g.ep_size > 1),
        block_numel=root + max(units, default=0),
        operator_numel=max(weights.values(), default=0),
        saved_nbytes=facts.saved_nbytes,
        working_nbytes=max(0, facts.peak_nbytes - facts.saved_nbytes),
        recomputed=recomputed,
    )  # fmt: skip


def ranks_of(profile: HardwareProfile) -> Ranks:
    return Ranks(profile.ranks_per_node, profile.nodes)


@dataclass(frozen=True)
class Room:
    """Bytes of one GPU, of one node's RAM and of one node's disks. No GPU: 0, RAM is all."""

    device_nbytes: int
    host_nbytes: int
    nvme_nbytes: int

    def capacity(self, tier: Tier) -> int:
        by_tier = {
            Tier.DEVICE: self.device_nbytes,
            Tier.HOST: self.host_nbytes,
            Tier.NVME: self.nvme_nbytes,
        }
        return by_tier[tier]


def room_of(profile: HardwareProfile) -> Room:
    """Return the capacities that offload's planner uses: all systems are compared at the same
    ones."""
    return Room(profile.gpu_free_nbytes, profile.usable_ram_nbytes, profile.nvme_nbytes)


def places_of(
    held: Mapping[Tier, Mapping[MemoryClass, int]], room: Room, ranks_per_node: int
) -> Mapping[Tier, PlaceEstimate]:
    """Return the bytes that a system holds in each tier, and the tier's capacity. Without a GPU its
    bytes are in RAM.

    `held`: of one GPU, of one node's RAM and of one node's disks.
    """
    held_by_tier = {tier: Counter(held.get(tier, {})) for tier in Tier}
    if not room.device_nbytes:
        for each, nbytes in held_by_tier.pop(Tier.DEVICE).items():
            if each is not MemoryClass.FRAMEWORK:  # no context, no NCCL
                held_by_tier[Tier.HOST][each] += nbytes * ranks_per_node
    return {
        tier: PlaceEstimate(room.capacity(tier), {m: book[m] for m in MemoryClass if book[m]})
        for tier, book in held_by_tier.items()
    }


def too_full(places: Mapping[Tier, PlaceEstimate]) -> Iterator[Tier]:
    """Yield the tiers whose bytes exceed their capacity."""
    for tier, place in places.items():
        if place.peak_nbytes > place.capacity_nbytes:
            yield tier
