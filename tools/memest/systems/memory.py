"""The memory of one model under the usual training systems, by the formulas of their papers.

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
    MegaTrain         RAM           RAM           RAM: two moments, no master: 12 bytes

Beside these, named with their sources below: buffers of fixed size, parameters gathered for the
work at hand, activations, 5 % that the allocator loses, and what libraries take.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from offload.planning.plan.estimate import MemoryClass as M
from offload.tiers.tier import Tier
from offload.tools.memest.systems.subject import Ranks, Subject

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME

# Settings of DeepSpeed that its documentation gives as defaults, in elements.
BUCKET_NUMEL = 500_000_000  # reduce_bucket_size
LIVE_NUMEL = 1_000_000_000  # stage3_max_live_parameters
SWAP_BUFFERS, SWAP_BUFFER_NUMEL = 5, 100_000_000  # offload_param.buffer_count and buffer_size
UPDATE_BUFFERS, UPDATE_NUMEL = 4, 1_000_000_000  # offload_optimizer.buffer_count, sub_group_size

# A CUDA context, cuBLAS's workspace and NCCL's channels; an interpreter with PyTorch and CUDA.
GPU_FRAMEWORK_NBYTES = 1 << 30
HOST_FRAMEWORK_NBYTES = 3 << 30
# Memory that a caching allocator holds unused; ZeRO's paper saw up to 30 % (section 3.2).
FRAGMENTATION = 0.05


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
    MEGATRAIN = "MegaTrain"
    OURS = "offload"


@dataclass(frozen=True)
class Numbers:
    """Bytes per element."""

    parameter: int = 2
    states: int = 8  # of the optimizer: 4 for each that it keeps

    @property
    def full(self) -> int:
        """The bytes per element of an fp32 copy beside 16-bit parameters; 0 if they are fp32."""
        return 4 if self.parameter < 4 else 0


@dataclass(frozen=True)
class Sizes:
    """A model as one GPU of several sees it, in elements; shards are even."""

    subject: Subject
    ranks: Ranks

    @property
    def whole(self) -> int:
        """The parameters of which each GPU has all of its part."""
        return self._part(self.subject.numel)

    @property
    def trained(self) -> int:
        return self._part(self.subject.numel_trainable)

    @property
    def shard(self) -> int:
        return -(-self.subject.numel // self.ranks.count)

    @property
    def trained_shard(self) -> int:
        return -(-self.subject.numel_trainable // self.ranks.count)

    @property
    def bucket(self) -> int:
        return min(BUCKET_NUMEL, self.trained)

    def _part(self, numel: int) -> int:
        experts = self.subject.expert_numel * numel // max(1, self.subject.numel)
        dense = numel - experts
        return -(-dense // self.ranks.tensor) - (-experts // self.ranks.experts)


@dataclass(frozen=True)
class Framework:
    """The memory that libraries take: on each GPU, and in RAM for each rank."""

    gpu_nbytes: int = GPU_FRAMEWORK_NBYTES
    host_nbytes: int = HOST_FRAMEWORK_NBYTES


FRAMEWORK = Framework()
Bytes = Mapping[Tier, Mapping[M, int]]
Held = dict[Tier, dict[M, int]]


def memory_of(
    system: System, subject: Subject, ranks: Ranks, numbers: Numbers,
    framework: Framework = FRAMEWORK,
) -> Bytes:  # fmt: skip
    """Return the bytes by class, of one GPU, of one node's RAM and of one node's disks.

    `subject.activation_nbytes` stay on the GPU, except where a system moves the inputs of
    recomputed blocks to RAM. Not for `System.OURS`, which the planner counts.
    """
    held: Held = {tier: defaultdict(int) for tier in Tier}
    sizes = Sizes(subject, ranks)
    _states(held, system, sizes, numbers)
    _HOMES[system].buffers(held, sizes, numbers)
    _activations(held, system, subject, ranks)
    return with_libraries(held, ranks, framework)


def with_libraries(held: Held, ranks: Ranks, framework: Framework = FRAMEWORK) -> Bytes:
    """Return the bytes that one rank holds, with its libraries and the losses of its allocators
    added; RAM and disk are those of all ranks of a node."""
    held[DEVICE][M.FRAMEWORK] += framework.gpu_nbytes
    held[HOST][M.FRAMEWORK] += framework.host_nbytes
    for tier in (DEVICE, HOST):
        place = held[tier]
        used = sum(nbytes for each, nbytes in place.items() if each is not M.FRAMEWORK)
        place[M.FRAGMENTATION] += int(used * FRAGMENTATION)
    times = {DEVICE: 1, HOST: ranks.per_node, NVME: ranks.per_node}
    return {
        tier: {each: nbytes * times[tier] for each, nbytes in place.items() if nbytes}
        for tier, place in held.items()
    }


def _activations(held: Held, system: System, subject: Subject, ranks: Ranks) -> None:
    """Count activations, cut over tensor-parallel GPUs (ZeRO-R's partitioned activations,
    1910.02054 section 6.1).

    ZeRO-Infinity keeps the inputs of recomputed blocks in RAM (2104.07857, section 5.1.2).
    """
    saved, working = subject.saved_nbytes // ranks.tensor, subject.working_nbytes // ranks.tensor
    leaves = system in (System.INFINITY_CPU, System.INFINITY_NVME) and subject.recomputed
    held[HOST if leaves else DEVICE][M.ACTIVATIONS] += saved
    held[DEVICE][M.ACTIVATIONS] += working


def _bucket(held: Held, sizes: Sizes, numbers: Numbers) -> None:
    """Count the bucket through which gradients are reduced, and leave."""
    held[DEVICE][M.STAGING] += numbers.parameter * sizes.bucket


def _ddp_buckets(held: Held, sizes: Sizes, numbers: Numbers) -> None:
    """Count DDP's buckets, which with several GPUs hold each gradient once more
    (`gradient_as_bucket_view=False`, the default)."""
    if sizes.ranks.data > 1:
        held[DEVICE][M.STAGING] += numbers.parameter * sizes.trained


def _gathered(held: Held, sizes: Sizes, numbers: Numbers) -> None:
    """Count gathered parameters: ZeRO-3 gathers module by module and keeps up to a number of
    elements for reuse; it needs the largest weight and its gradient whole (2104.07857, section 3,
    model state working memory)."""
    largest = sizes.subject.operator_numel
    live = max(largest, min(LIVE_NUMEL, sizes.subject.numel))
    held[DEVICE][M.STAGING] += numbers.parameter * (live + largest + sizes.bucket)


def _gathered_from_nvme(held: Held, sizes: Sizes, numbers: Numbers) -> None:
    """Count pinned buffers that stream parameters, and one group of elements of the update."""
    _gathered(held, sizes, numbers)
    largest_shard = -(-sizes.subject.operator_numel // sizes.ranks.count)
    swap = min(sizes.shard, max(SWAP_BUFFER_NUMEL, largest_shard))
    update = min(sizes.trained_shard, UPDATE_NUMEL)
    held[HOST][M.STAGING] += SWAP_BUFFERS * numbers.parameter * swap + UPDATE_BUFFERS * 4 * update


def _fsdp_gathered(held: Held, sizes: Sizes, numbers: Numbers) -> None:
    """Count the current unit and the next one, parameters and gradients (2304.11277: at most two
    gathers in flight)."""
    held[DEVICE][M.STAGING] += numbers.parameter * 2 * 2 * sizes.subject.block_numel


def _two_layers(held: Held, sizes: Sizes, numbers: Numbers) -> None:
    """Count two alternating layers on MegaTrain's GPU, and the gradients of one."""
    held[DEVICE][M.STAGING] += numbers.parameter * 3 * sizes.subject.block_numel


@dataclass(frozen=True)
class _Homes:
    """The homes of a system's states; each GPU has a shard of those that are `shared`."""

    parameters: Tier
    gradients: Tier | None  # None: they leave as they are made
    states: Tier
    shared: str  # of parameters, gradients and states: their first letters
    buffers: Callable[[Held, Sizes, Numbers], None]


_HOMES = {
    System.DDP: _Homes(DEVICE, DEVICE, DEVICE, "", _ddp_buckets),
    System.ZERO1: _Homes(DEVICE, DEVICE, DEVICE, "s", _bucket),
    System.ZERO2: _Homes(DEVICE, DEVICE, DEVICE, "gs", _bucket),
    System.ZERO3: _Homes(DEVICE, DEVICE, DEVICE, "pgs", _gathered),
    System.FSDP: _Homes(DEVICE, DEVICE, DEVICE, "pgs", _fsdp_gathered),
    System.FSDP_CPU: _Homes(HOST, HOST, HOST, "pgs", _fsdp_gathered),  # `CPUOffloadPolicy`
    System.ZERO_OFFLOAD: _Homes(DEVICE, None, HOST, "s", _bucket),
    System.INFINITY_CPU: _Homes(HOST, HOST, HOST, "pgs", _gathered),
    System.INFINITY_NVME: _Homes(NVME, NVME, NVME, "pgs", _gathered_from_nvme),
    System.MEGATRAIN: _Homes(HOST, HOST, HOST, "pgs", _two_layers),
}


def _states(held: Held, system: System, sizes: Sizes, numbers: Numbers) -> None:
    homes = _HOMES[system]
    kept = sizes.shard if "p" in homes.shared else sizes.whole
    made = sizes.trained_shard if "g" in homes.shared else sizes.trained
    stepped = sizes.trained_shard if "s" in homes.shared else sizes.trained
    full = numbers.full
    if system in (System.FSDP, System.FSDP_CPU):
        # `fully_shard` with a `MixedPrecisionPolicy`: the fp32 parameter is the master
        held[homes.parameters][M.MASTER if full else M.PARAMETERS] += 4 * kept
        held[homes.parameters][M.GRADIENTS] += 4 * made
        full = 0
    else:
        held[homes.parameters][M.PARAMETERS] += numbers.parameter * kept
        if homes.gradients is not None:
            held[homes.gradients][M.GRADIENTS] += numbers.parameter * made
    if system is System.MEGATRAIN:  # steps the 16-bit weights
        full = 0
    if system is System.ZERO_OFFLOAD:  # in RAM there is an fp32 copy of fp32 weights, too
        full = 4
    held[homes.states][M.GRADIENTS] += full * stepped
    held[homes.states][M.MASTER] += full * stepped
    held[homes.states][M.OPTIMIZER] += numbers.states * stepped


OTHERS = tuple(system for system in System if system not in (System.OURS, System.MEGATRAIN))
