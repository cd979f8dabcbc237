"""Memory of one model under the systems that people train with, by the formulas of their papers.

Counted alike for all: a 16-bit parameter, its 16-bit gradient, and in fp32 a master, the states of
the optimizer and the gradient that the master is stepped with, 2 + 2 + 4 + 8 + 4 = 20 bytes with
Adam (ZeRO-Infinity, arXiv 2104.07857, section 3; in fp32 throughout no master and one gradient).
Where each of them lives, and over how many GPUs it is cut up:

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
from collections.abc import Mapping
from dataclasses import dataclass

from offload.planning.plan.estimate import MemoryClass as M
from offload.tiers.extent import TierName
from offload.tools.memest.subject import Ranks, Subject

DEVICE, HOST, NVME = TierName.DEVICE, TierName.HOST, TierName.NVME

# Settings of DeepSpeed that its documentation gives as defaults, in elements.
BUCKET_NUMEL = 500_000_000  # reduce_bucket_size
LIVE_NUMEL = 1_000_000_000  # stage3_max_live_parameters
SWAP_BUFFERS, SWAP_BUFFER_NUMEL = 5, 100_000_000  # offload_param.buffer_count and buffer_size
UPDATE_BUFFERS, UPDATE_NUMEL = 4, 1_000_000_000  # offload_optimizer.buffer_count, sub_group_size

# A CUDA context, cuBLAS's workspace and NCCL's channels; an interpreter with PyTorch and CUDA.
GPU_FRAMEWORK_NBYTES = 1 << 30
HOST_FRAMEWORK_NBYTES = 3 << 30
# What a caching allocator holds and cannot use; ZeRO's paper has seen up to 30 % (section 3.2).
FRAGMENTATION = 0.05


class System(enum.StrEnum):
    """A way to train, in the order in which they are compared."""

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
        """An fp32 copy beside 16-bit parameters; nothing where they are fp32."""
        return 4 if self.parameter < 4 else 0


@dataclass(frozen=True)
class Sizes:
    """A model as one GPU of several sees it. Elements; a shard is an even one."""

    subject: Subject
    ranks: Ranks

    @property
    def whole(self) -> int:
        """Parameters of which each GPU has all of its part."""
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
    """What libraries take: of each GPU, and of RAM for each rank."""

    gpu_nbytes: int = GPU_FRAMEWORK_NBYTES
    host_nbytes: int = HOST_FRAMEWORK_NBYTES


FRAMEWORK = Framework()
Bytes = Mapping[TierName, Mapping[M, int]]
_Books = dict[TierName, dict[M, int]]


def memory_of(
    system: System, subject: Subject, ranks: Ranks, numbers: Numbers,
    framework: Framework = FRAMEWORK,
) -> Bytes:  # fmt: skip
    """Bytes by class, of one GPU, of one node's RAM and of one node's disks.

    `subject.activation_nbytes` stay on the GPU, except where a system moves the inputs of
    recomputed blocks to RAM. Not for `System.OURS`, which the planner counts.
    """
    books: _Books = {tier: defaultdict(int) for tier in TierName}
    _STATES[system](books, Sizes(subject, ranks), numbers)
    _activations(books, system, subject, ranks)
    books[DEVICE][M.FRAMEWORK] += framework.gpu_nbytes
    books[HOST][M.FRAMEWORK] += framework.host_nbytes
    for tier in (DEVICE, HOST):
        held = sum(nbytes for each, nbytes in books[tier].items() if each is not M.FRAMEWORK)
        books[tier][M.FRAGMENTATION] = int(held * FRAGMENTATION)
    per_node = {DEVICE: 1, HOST: ranks.per_node, NVME: ranks.per_node}
    return {
        tier: {each: nbytes * per_node[tier] for each, nbytes in by_class.items() if nbytes}
        for tier, by_class in books.items()
    }


def _activations(books: _Books, system: System, subject: Subject, ranks: Ranks) -> None:
    """Cut over tensor-parallel GPUs (ZeRO-R's partitioned activations, 1910.02054 section 6.1).

    ZeRO-Infinity keeps the inputs of recomputed blocks in RAM (2104.07857, section 5.1.2).
    """
    saved, working = subject.saved_nbytes // ranks.tensor, subject.working_nbytes // ranks.tensor
    leaves = system in (System.INFINITY_CPU, System.INFINITY_NVME) and subject.recomputed
    books[HOST if leaves else DEVICE][M.ACTIVATIONS] += saved
    books[DEVICE][M.ACTIVATIONS] += working


def _update_states(place: dict[M, int], numel: int, numbers: Numbers) -> None:
    """What one optimizer step needs in fp32 for `numel` elements."""
    place[M.GRADIENTS] += numbers.full * numel
    place[M.MASTER] += numbers.full * numel
    place[M.OPTIMIZER] += numbers.states * numel


def _ddp(books: _Books, sizes: Sizes, numbers: Numbers) -> None:
    """Everything on every GPU. With several, DDP's buckets hold each gradient once more
    (`gradient_as_bucket_view=False`, the default)."""
    device = books[DEVICE]
    device[M.PARAMETERS] += numbers.parameter * sizes.whole
    device[M.GRADIENTS] += numbers.parameter * sizes.trained
    _update_states(device, sizes.trained, numbers)
    if sizes.ranks.data > 1:
        device[M.STAGING] += numbers.parameter * sizes.trained


def _zero1(books: _Books, sizes: Sizes, numbers: Numbers) -> None:
    device = books[DEVICE]
    device[M.PARAMETERS] += numbers.parameter * sizes.whole
    device[M.GRADIENTS] += numbers.parameter * sizes.trained
    _update_states(device, sizes.trained_shard, numbers)
    device[M.STAGING] += numbers.parameter * sizes.bucket


def _zero2(books: _Books, sizes: Sizes, numbers: Numbers) -> None:
    device = books[DEVICE]
    device[M.PARAMETERS] += numbers.parameter * sizes.whole
    device[M.GRADIENTS] += numbers.parameter * sizes.trained_shard
    _update_states(device, sizes.trained_shard, numbers)
    device[M.STAGING] += numbers.parameter * sizes.bucket


def _zero3(books: _Books, sizes: Sizes, numbers: Numbers) -> None:
    device = books[DEVICE]
    device[M.PARAMETERS] += numbers.parameter * sizes.shard
    device[M.GRADIENTS] += numbers.parameter * sizes.trained_shard
    _update_states(device, sizes.trained_shard, numbers)
    _gathered(books, sizes, numbers)


def _gathered(books: _Books, sizes: Sizes, numbers: Numbers) -> None:
    """ZeRO-3 gathers module by module and keeps up to a number of elements for reuse; it needs the
    largest weight and its gradient whole (2104.07857, section 3, model state working memory)."""
    largest = sizes.subject.operator_numel
    live = max(largest, min(LIVE_NUMEL, sizes.subject.numel))
    books[DEVICE][M.STAGING] += numbers.parameter * (live + largest + sizes.bucket)


def _fsdp(books: _Books, sizes: Sizes, numbers: Numbers) -> None:
    _fsdp_states(books[DEVICE], sizes, numbers)
    _fsdp_gathered(books[DEVICE], sizes, numbers)


def _fsdp_cpu(books: _Books, sizes: Sizes, numbers: Numbers) -> None:
    """`CPUOffloadPolicy`: shards of all states in RAM, stepped there."""
    _fsdp_states(books[HOST], sizes, numbers)
    _fsdp_gathered(books[DEVICE], sizes, numbers)


def _fsdp_states(place: dict[M, int], sizes: Sizes, numbers: Numbers) -> None:
    """`fully_shard` with a `MixedPrecisionPolicy`: the fp32 parameter is the master."""
    place[M.MASTER if numbers.full else M.PARAMETERS] += 4 * sizes.shard
    place[M.GRADIENTS] += 4 * sizes.trained_shard
    place[M.OPTIMIZER] += numbers.states * sizes.trained_shard


def _fsdp_gathered(device: dict[M, int], sizes: Sizes, numbers: Numbers) -> None:
    """The unit at work and the next one, parameters and gradients (2304.11277: at most two
    gathers in flight)."""
    device[M.STAGING] += numbers.parameter * 2 * 2 * sizes.subject.block_numel


def _zero_offload(books: _Books, sizes: Sizes, numbers: Numbers) -> None:
    """Gradients leave through a bucket as they are made."""
    books[DEVICE][M.PARAMETERS] += numbers.parameter * sizes.whole
    books[DEVICE][M.STAGING] += numbers.parameter * sizes.bucket
    _update_states(books[HOST], sizes.trained_shard, numbers)
    if not numbers.full:
        books[HOST][M.MASTER] += 4 * sizes.trained_shard
        books[HOST][M.GRADIENTS] += 4 * sizes.trained_shard


def _infinity_states(place: dict[M, int], sizes: Sizes, numbers: Numbers) -> None:
    place[M.PARAMETERS] += numbers.parameter * sizes.shard
    place[M.GRADIENTS] += numbers.parameter * sizes.trained_shard
    _update_states(place, sizes.trained_shard, numbers)


def _infinity_cpu(books: _Books, sizes: Sizes, numbers: Numbers) -> None:
    _infinity_states(books[HOST], sizes, numbers)
    _gathered(books, sizes, numbers)


def _infinity_nvme(books: _Books, sizes: Sizes, numbers: Numbers) -> None:
    """Pinned buffers stream everything: parameters, and one group of elements of the update."""
    _infinity_states(books[NVME], sizes, numbers)
    _gathered(books, sizes, numbers)
    largest_shard = -(-sizes.subject.operator_numel // sizes.ranks.count)
    swap = min(sizes.shard, max(SWAP_BUFFER_NUMEL, largest_shard))
    update = min(sizes.trained_shard, UPDATE_NUMEL)
    books[HOST][M.STAGING] += SWAP_BUFFERS * numbers.parameter * swap + UPDATE_BUFFERS * 4 * update


def _megatrain(books: _Books, sizes: Sizes, numbers: Numbers) -> None:
    """16-bit weights and gradients and two fp32 moments in RAM; the GPU has two layers in turn and
    the gradients of one."""
    host = books[HOST]
    host[M.PARAMETERS] += numbers.parameter * sizes.shard
    host[M.GRADIENTS] += numbers.parameter * sizes.trained_shard
    host[M.OPTIMIZER] += numbers.states * sizes.trained_shard
    books[DEVICE][M.STAGING] += numbers.parameter * 3 * sizes.subject.block_numel


_STATES = {
    System.DDP: _ddp,
    System.ZERO1: _zero1,
    System.ZERO2: _zero2,
    System.ZERO3: _zero3,
    System.FSDP: _fsdp,
    System.FSDP_CPU: _fsdp_cpu,
    System.ZERO_OFFLOAD: _zero_offload,
    System.INFINITY_CPU: _infinity_cpu,
    System.INFINITY_NVME: _infinity_nvme,
    System.MEGATRAIN: _megatrain,
}
OTHERS = tuple(system for system in System if system not in (System.OURS, System.MEGATRAIN))
