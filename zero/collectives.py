"""What ranks do together with a group's flat buffer, on torch.distributed.

    all-gather       shard | shard | shard   ->  whole, on every rank
    reduce-scatter   whole, on every rank    ->  each rank's shard of the average

A reduce-scatter is an all-to-all, in which every rank gets all contributions to its shard, and a
sum over them in the order of the ranks, in fp32, divided by their number once. So the average has
the same bits whatever the backend, and whatever part of the buffer a rank owns; 16-bit gradients
travel as they are and are summed without being rounded in between. (Gloo's own reduce-scatter is an
all-reduce, at twice the bytes.)

Either can send 8-bit codes instead (`block_codes`): fewer bytes, and approximate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from offload.zero.block_codes import add_decoded, decode, encode
from offload.zero.sharding import scales_numel

Group = dist.ProcessGroup


@dataclass(slots=True)
class Traffic:
    """Bytes of the buffers that ranks have gathered and reduced together, whole buffers each."""

    gathered_nbytes: int = 0
    reduced_nbytes: int = 0
    all_reduced_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory for one reduction at a time, where the model computes. All 1D uint8."""

    received: torch.Tensor  # as long as the largest contribution of a rank
    summed: torch.Tensor  # fp32, as long as the largest shard
    codes: torch.Tensor | None = None  # of the largest group's parameters in 8 bits, being gathered


@dataclass(frozen=True, slots=True)
class Wire:
    """In which format things travel."""

    reduce_dtype: torch.dtype | None = None  # gradients are rounded to it; None: they are not
    quantized_weights: bool = False
    quantized_gradients: bool = False


@dataclass(slots=True)
class Collectives:
    """The collectives of one rank. `gather` and `reduce` may run at the same time, each on one
    thread: they have process groups of their own."""

    gather_group: Group  # the ranks that share one copy of the states
    reduce_group: Group  # the same ranks
    replica_group: Group  # those that own the same shard
    wire: Wire = field(default_factory=Wire)
    traffic: Traffic = field(default_factory=Traffic)

    def gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `whole` (1D uint8) with the shards of all ranks, in order. `own` may be a view of
        this rank's place in it. Blocks; on a GPU, until the current stream is given the work."""
        self.traffic.gathered_nbytes += whole.numel()
        _all_gather(whole, own, self.gather_group)

    def gather_codes(
        self, whole: torch.Tensor, own: torch.Tensor, dtype: torch.dtype, room: torch.Tensor
    ) -> None:
        """As `gather`, approximately, of elements of `dtype`: all ranks, the owner too, get what
        the codes say. `room` (1D uint8) holds the codes meanwhile."""
        rank, values, shard = self.gather_group.rank(), whole.view(dtype), own.view(dtype)
        numel, step, blocks = values.numel(), shard.numel(), scales_numel(shard.numel())
        cut = numel + 4 * scales_numel(numel)
        codes, scales = room[:numel].view(torch.int8), room[numel:cut].view(torch.float32)
        own_codes = codes[rank * step : (rank + 1) * step]
        own_scales = scales[rank * blocks : (rank + 1) * blocks]
        encode(shard, own_codes, own_scales)
        for part, its_own in ((codes, own_codes), (scales, own_scales)):
            self.traffic.gathered_nbytes += part.numel() * part.element_size()
            _all_gather(part.view(torch.uint8), its_own.view(torch.uint8), self.gather_group)
        decode(codes, scales, values)

    def reduce(self, contribution: torch.Tensor, work: Workspace) -> torch.Tensor:
        """The average over all ranks of the world, of this rank's shard of it: 1D fp32, valid until
        the next call. `contribution` (1D, any float format) is equally long on every rank."""
        ranks, replicas = self.reduce_group.size(), self.replica_group.size()
        numel = contribution.numel() // ranks
        summed = work.summed.view(torch.float32)[:numel]
        if self.wire.quantized_gradients and ranks > 1:
            self._reduce_codes(contribution, work.received, summed)
        else:
            self.traffic.reduced_nbytes += contribution.numel() * contribution.element_size()
            received = work.received.view(contribution.dtype)[: contribution.numel()]
            _exchange_and_sum(contribution, received, summed, self.reduce_group)
        if replicas > 1:
            self.traffic.all_reduced_nbytes += summed.numel() * 4
            received = work.received.view(torch.float32)[:numel]
            rank, piece = self.replica_group.rank(), numel // replicas
            mine = summed[rank * piece : (rank + 1) * piece]
            # what was received is summed before `summed` is written to: they are apart
            _exchange_and_sum(summed, received, mine, self.replica_group)
            _all_gather(summed.view(torch.uint8), mine.view(torch.uint8), self.replica_group)
        return summed.div_(ranks * replicas)

    def _reduce_codes(
        self, contribution: torch.Tensor, room: torch.Tensor, out: torch.Tensor
    ) -> None:
        """out = the sum of what codes of all contributions say. `room` has 4 bytes per element."""
        ranks, numel = self.reduce_group.size(), contribution.numel()
        nbytes = 4 * scales_numel(numel)
        sizes = (numel, numel, nbytes, nbytes)
        codes, theirs, scales, their_scales = room[: sum(sizes)].split(sizes)
        encode(contribution, codes.view(torch.int8), scales.view(torch.float32))
        for received, sent in ((theirs, codes), (their_scales, scales)):
            self.traffic.reduced_nbytes += sent.numel()
            dist.all_to_all_single(received, sent, group=self.reduce_group)
        out.zero_()
        each = zip(
            theirs.view(torch.int8).view(ranks, -1),
            their_scales.view(torch.float32).view(ranks, -1), strict=True,
        )  # fmt: skip
        for part, scale in each:
            add_decoded(part, scale, out)


def _exchange_and_sum(
    contribution: torch.Tensor, received: torch.Tensor, out: torch.Tensor, group: Group
) -> None:
    """out = the sum, in the order of the ranks, of what all of them contribute to this one."""
    ranks = group.size()
    if ranks == 1:
        out.copy_(contribution)
        return
    dist.all_to_all_single(received, contribution, group=group)
    parts = received.view(ranks, -1)
    if received.dtype is torch.float32:
        torch.add(parts[0], parts[1], out=out)
        rest = parts[2:]
    else:
        out.copy_(parts[0])
        rest = parts[1:]
    for part in rest:
        out.add_(part)


def _all_gather(whole: torch.Tensor, own: torch.Tensor, group: Group) -> None:
    ranks, rank, step = group.size(), group.rank(), own.numel()
    place = whole[rank * step : (rank + 1) * step]
    if ranks == 1 or _sends_faster(whole, group):
        if place.data_ptr() != own.data_ptr():
            place.copy_(own)
        if ranks > 1:
            _send_to_all(whole, place, group)
        return
    all_gather_flat(whole, own, group)


def all_gather_flat(whole: torch.Tensor, own: torch.Tensor, group: Group) -> None:
    """The backend's own all-gather of 1D tensors, by the name it has in this PyTorch."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, own, group=group)


def _sends_faster(whole: torch.Tensor, group: Group) -> bool:
    """Gloo's all-gather takes two to three times as long as sending each shard to every rank."""
    return whole.device.type == "cpu" and dist.get_backend(group) == "gloo"


def _send_to_all(whole: torch.Tensor, own: torch.Tensor, group: Group) -> None:
    ranks, rank, step = group.size(), group.rank(), own.numel()
    moves = []
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        moves.append(dist.P2POp(dist.isend, own, group=group, group_peer=to))
        arriving = whole[source * step : (source + 1) * step]
        moves.append(dist.P2POp(dist.irecv, arriving, group=group, group_peer=source))
    for work in dist.batch_isend_irecv(moves):
        work.wait()
