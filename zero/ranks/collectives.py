"""Collectives over a group's flat buffer, on torch.distributed.

    all-gather       shard | shard | shard   ->  whole, on every rank
    reduce-scatter   whole, on every rank    ->  each rank's shard of the average

A reduce-scatter is an all-to-all, in which every rank gets all contributions to its shard, and a
sum over them in the order of the ranks, in fp32, divided by their number once. So the bits of the
average depend neither on the backend nor on which part of the buffer a rank owns; 16-bit gradients
travel as they are and are summed without intermediate rounding. (Gloo's own reduce-scatter is an
all-reduce, at twice the bytes.)
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from zlib import crc32

import torch
import torch.distributed as dist

from offload.swap.device.fences import Fences
from offload.swap.states.slot_pool import SlotPool
from offload.swap.threads.lanes import profiled
from offload.zero.ranks.rank_watch import RankWatch

Group = dist.ProcessGroup
Fetch = Callable[..., None]  # fills the others' places in a buffer, within a limit


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory for one reduction at a time, where the model computes. All 1D uint8."""

    received: torch.Tensor  # the largest contribution of a rank, in the format that travels
    summed: torch.Tensor  # fp32, as long as the largest shard


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory where the model computes, for what belongs to several ranks: whole parameters, and
    gradients that wait for other ranks'."""

    pool: SlotPool
    gather_nbytes: int  # room for whole parameters
    workspace: Workspace
    fences: Fences


@dataclass(slots=True)
class Collectives:
    """The collectives of one rank. `gather` and `reduce` may run at the same time, each on one
    thread: they have process groups of their own."""

    gather_group: Group  # the ranks that share one copy of the states
    reduce_group: Group  # the same ranks
    replica_group: Group  # those that own the same shard
    watch: RankWatch
    # bytes of the buffers that ranks have gathered and reduced together, whole buffers each
    moved_nbytes: Counter[str] = field(default_factory=Counter)

    def gather(
        self, whole: torch.Tensor, own: torch.Tensor, name: str, fetch: Fetch | None = None
    ) -> None:
        """Fill `whole` (1D uint8), of the group `name`, with the shards of all ranks, in order.
        `own` may be a view of this rank's place in it. Blocks; on a GPU only until the work is
        queued on the current stream. `fetch` asks the others for their shards; without it, all
        ranks gather at the same time. Raises RankError if a rank does not take part."""
        self.moved_nbytes["all-gather"] += whole.numel()
        what, group = f"the all-gather of {named(name)}", self.gather_group
        with self.watch.during(what, group, on_device=True) as limit:
            if fetch is None:
                _all_gather(whole, own, group, what, limit)
                return
            _place_of(whole, own, group)
            fetch(whole, limit)

    def reduce(self, contribution: torch.Tensor, work: Workspace, name: str) -> torch.Tensor:
        """Return the average over all ranks of the world, of this rank's shard of it: 1D fp32,
        valid until the next call. `contribution` (1D, any float format), of the group `name`, is
        equally long on every rank. Raises RankError if a rank does not take part."""
        what = f"the reduce-scatter of {named(name)}"
        groups = self.reduce_group, self.replica_group
        with profiled(what), self.watch.during(what, *groups, on_device=True) as limit:
            return self._reduce(contribution, work, what, limit)

    def _reduce(
        self, contribution: torch.Tensor, work: Workspace, what: str, limit: timedelta
    ) -> torch.Tensor:
        ranks, replicas = self.reduce_group.size(), self.replica_group.size()
        numel = contribution.numel() // ranks
        summed = work.summed.view(torch.float32)[:numel]
        own = summed
        if ranks == 1:
            own = contribution
        else:
            self.moved_nbytes["reduce-scatter"] += contribution.nbytes
            _exchange_and_sum(contribution, work.received, summed, self.reduce_group)
        if replicas > 1:
            self.moved_nbytes["all-reduce"] += own.nbytes + summed.nbytes  # and gathered again
            rank, piece = self.replica_group.rank(), numel // replicas
            mine = summed[rank * piece : (rank + 1) * piece]
            # this rank's own elements, which the sum is written over, have been sent by then
            _exchange_and_sum(own, work.received, mine, self.replica_group)
            whole = summed.view(torch.uint8)
            _all_gather(whole, mine.view(torch.uint8), self.replica_group, what, limit)
        elif ranks == 1:
            summed.copy_(contribution)
        return summed.div_(ranks * replicas)


def named(name: str) -> str:
    """Return a group's name for messages; `name` is empty for the model's own parameters."""
    return name if name and not name.startswith(" ") else f"the model's own{name or ' parameters'}"


def _exchange_and_sum(
    contribution: torch.Tensor, room: torch.Tensor, out: torch.Tensor, group: Group
) -> None:
    """Set `out` to the sum, in the order of the ranks, of all contributions to this rank. `room`
    (1D uint8) holds them; if it is too small, they are exchanged piece by piece, which copies what
    is sent."""
    ranks, numel = group.size(), contribution.numel()
    room = room.view(contribution.dtype)
    if numel <= room.numel():
        received = room[:numel]
        dist.all_to_all_single(received, contribution, group=group)
        _sum_in_order(received.view(ranks, -1), out)
        return
    shards = contribution.view(ranks, -1)
    max_numel = room.numel() // (2 * ranks)
    for start in range(0, out.numel(), max_numel):
        stop = min(start + max_numel, out.numel())
        sent, received = room[: 2 * ranks * (stop - start)].view(2, -1)
        sent.view(ranks, -1).copy_(shards[:, start:stop])
        dist.all_to_all_single(received, sent, group=group)
        _sum_in_order(received.view(ranks, -1), out[start:stop])


def _sum_in_order(parts: torch.Tensor, out: torch.Tensor) -> None:
    if parts.dtype is torch.float32:
        torch.add(parts[0], parts[1], out=out)
        rest = parts[2:]
    else:
        out.copy_(parts[0])
        rest = parts[1:]
    for part in rest:
        out.add_(part)


def _all_gather(
    whole: torch.Tensor, own: torch.Tensor, group: Group, what: str, limit: timedelta
) -> None:
    # Gloo's own all-gather takes two to three times as long
    is_gloo = whole.device.type == "cpu" and dist.get_backend(group) == "gloo"
    if group.size() == 1 or is_gloo:
        _send_to_all(whole, _place_of(whole, own, group), group, what, limit)
        return
    all_gather_flat(whole, own, group)


def _place_of(whole: torch.Tensor, own: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's place in `whole`, with its `own` shard there."""
    rank, step = group.rank(), own.numel()
    place = whole[rank * step : (rank + 1) * step]
    if place.data_ptr() != own.data_ptr():
        place.copy_(own)
    return place


def all_gather_flat(whole: torch.Tensor, own: torch.Tensor, group: Group) -> None:
    """Call the backend's own all-gather of 1D tensors, by the name it has in this PyTorch."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, own, group=group)


def _send_to_all(
    whole: torch.Tensor, own: torch.Tensor, group: Group, what: str, limit: timedelta
) -> None:
    """Send shards under the name of `what` is gathered, so that a rank that gathers another group
    receives nothing instead of the wrong parameters."""
    ranks, rank, step = group.size(), group.rank(), own.numel()
    moves, tag = [], crc32(what.encode()) & 0x7FFFFFFF
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        moves.append(group.send([own], to, tag))
        moves.append(group.recv([whole[source * step : (source + 1) * step]], source, tag))
    for work in moves:
        work.wait(limit)
