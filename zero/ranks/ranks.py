"""The processes that train together: their groups, and the small messages they exchange."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import NoReturn
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh

from offload.tiers import accelerator
from offload.tiers.errors import ConfigError, RankError
from offload.zero.ranks.collectives import Collectives, Group, all_gather_flat
from offload.zero.ranks.rank_watch import RankWatch
from offload.zero.ranks.sharding import ALONE, Sharding

_MAX_TEXT_NBYTES = 500  # of an error's text sent to other ranks
_FEW = 6  # numbers that go with the question
_NCCL_MARGIN = timedelta(seconds=60)  # NCCL's own watch, which ends the process, comes later


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    sharding: Sharding
    device: torch.device
    control: Group  # all ranks, between CPUs
    watch: RankWatch
    owns_world: bool  # the process group was made here
    beside: bool = False  # for a thread beside the model's, in an order of its own
    # actions of all ranks since the last exchange: the next one compares them
    notes: list[str] = field(default_factory=list)

    @classmethod
    def join(
        cls, stage: int, shard_group: int | None, device: torch.device, timeout_s: float,
        members: DeviceMesh | None = None, alike: Mapping[str, str] | None = None,
    ) -> Ranks | None:  # fmt: skip
        """Return the ranks of the process group that is there, or of the one that the environment
        asks for (`torchrun`); None for a process alone.

        `members`: only the ranks of this mesh (1D), each of which has to call this; every rank
        otherwise. `alike`: keys and values that have to be the same everywhere. Raises ConfigError
        if one is not, or if the shard groups do not come out even; RankError if a rank does not
        come within `timeout_s`.
        """
        owns_world = start_world(device, timeout_s)
        if len(data_ranks(members)) == 1:
            return None
        return cls.meet(
            stage, shard_group, device, timeout_s, members, alike or {}, owns_world=owns_world
        )

    @classmethod
    def meet(
        cls, stage: int, shard_group: int | None, device: torch.device, timeout_s: float,
        members: DeviceMesh | None = None, alike: Mapping[str, str] | None = None,
        *, owns_world: bool = False,
    ) -> Ranks:  # fmt: skip
        """Join as `join` does, where there is a process group, also of one rank."""
        ranks = sorted(data_ranks(members))  # as a process group counts them
        mine = dist.get_rank()
        assert dist.group.WORLD is not None, "there is a process group"
        store = dist.group.WORLD.get_group_store()
        watch = RankWatch(store, mine, ranks, timeout_s, device)
        try:
            with watch.during("the meeting in offload.initialize") as limit:
                control = _group_of(ranks, limit, "gloo")
            met = cls(ALONE, device, control, watch, owns_world)
            if alike:
                met._check_alike(alike)
            sharding = Sharding.of(stage, shard_group, len(ranks), ranks.index(mine))
        except BaseException:
            watch.close()
            raise
        return replace(met, sharding=sharding)

    def _check_alike(self, alike: Mapping[str, str]) -> None:
        """Raise ConfigError, on every rank, for the first key whose value differs somewhere."""
        table = self.exchange([crc32(value.encode()) for value in alike.values()], "the settings")
        for (key, value), column in zip(alike.items(), table.T, strict=True):
            others = np.flatnonzero(column != column[0])
            if len(others):
                here = f"; here, on rank {self.rank}, it is {value}" if len(value) < 80 else ""
                raise ConfigError(
                    f"{key} has to be the same on all ranks, and rank {others[0]} has another one "
                    f"than rank 0{here}"
                )

    @property
    def rank(self) -> int:
        return self.control.rank()

    @property
    def world_size(self) -> int:
        return self.control.size()

    @property
    def in_world(self) -> list[int]:
        """The ranks as the world counts them."""
        return dist.get_process_group_ranks(self.control)

    def same_experts(self, ep_size: int) -> Ranks | None:
        """Return those ranks that have the experts of this one, where `ep_size` neighbours have all
        of them together; None if it is the only one. Every rank has to call this."""
        sharding = self.sharding.of_experts(ep_size)
        if sharding.world_size == 1:
            return None
        ranks = self.in_world[self.rank % ep_size :: ep_size]
        return replace(self.beside_training(ranks), sharding=sharding, beside=False)

    def beside_training(self, ranks: Sequence[int] | None = None) -> Ranks:
        """Return these ranks, or some of them, with a process group of their own, for a thread
        beside the model's. Every rank has to call this."""
        with self.watch.during("the making of process groups") as limit:
            control = _group_of(ranks or self.in_world, limit, "gloo")
        return replace(self, control=control, owns_world=False, beside=True, notes=[])

    def collectives(self) -> Collectives:
        """Return process groups for gathering and reducing threads. Every rank has to call this."""
        ranks, place = self.in_world, self.sharding
        first = place.replica * place.ranks
        shards, replicas = ranks[first : first + place.ranks], ranks[place.rank :: place.ranks]
        limit = timedelta(seconds=self.watch.timeout_s)
        if accelerator.is_accelerator(self.device):
            limit += _NCCL_MARGIN
        with self.watch.during("the making of process groups"):
            gather, reduce, across = (_group_of(each, limit) for each in (shards, shards, replicas))
        return Collectives(gather, reduce, across, self.watch)

    def exchange(
        self, numbers: Sequence[int], what: str = "what each rank has", name: str = ""
    ) -> np.ndarray:
        """Return every rank's numbers, one row each (int64). Raises RankError, on every rank,
        unless all of them ask for `what`, of as many numbers. `name` is for that error."""
        few = len(numbers) <= _FEW
        with self._together(f"the all-gather of {what}", numbers, name) as rows:
            table = rows if few else self._gather(torch.tensor(numbers, dtype=torch.int64))
        return table[:, : len(numbers)]

    def exchange_sums(self, mine: Sequence[float]) -> np.ndarray:
        """Return the numbers of each rank, one row each (fp64)."""
        bits = np.array(mine, dtype=np.float64).view(np.int64)
        return self.exchange(bits.tolist(), "gradient norms").view(np.float64)

    def _gather(self, numbers: torch.Tensor) -> np.ndarray:
        rows = numbers.new_empty(self.world_size * numbers.numel())
        all_gather_flat(rows, numbers, self.control)
        return rows.numpy().reshape(self.world_size, -1)

    @contextmanager
    def _together(
        self, what: str, numbers: Sequence[int] = (), name: str = ""
    ) -> Iterator[np.ndarray]:
        """Inside, all ranks are in the same small collective: gives the first few `numbers` of
        each. A rank that is in another one would get what was sent for that, or, of another size,
        the end of its process (gloo's)."""
        with self.watch.during(what, self.control, beside=self.beside):
            asked = "\n".join([what, *self.notes])
            few = [*numbers[:_FEW], *[0] * (_FEW - len(numbers))]
            turn, begun = (0, []) if self.beside else self.watch.begun
            if not self.beside:
                self.watch.follow(what)
            question = [crc32("\n".join(begun).encode()), crc32(asked.encode()), len(numbers), *few]
            rows = self._gather(torch.tensor(question, dtype=torch.int64))
            if (rows[:, 0] != rows[0, 0]).any():
                self.watch.await_difference()
            if (rows[:, 1:3] != rows[0, 1:3]).any():
                self._refuse_to_part(f"{what}{name and f' ({name})'}")
            self.notes.clear()
            if not self.beside:
                self.watch.begun = turn + 1, []
            yield rows[:, 3:]

    def _refuse_to_part(self, what: str) -> NoReturn:
        if self.notes:
            what += f", after {len(self.notes)} changes, the last one: {self.notes[-1]}"
        texts = zip(self.in_world, self._texts(what), strict=True)
        asked = "; ".join(f"rank {rank} wants {each}" for rank, each in texts)
        # A rank that leaves closes its connections, and what a slower one has received but not yet
        # looked at would be an error there: so no rank leaves before all have come.
        with suppress(RuntimeError):  # a rank has left already: then all had come
            self._gather(torch.zeros(1, dtype=torch.int32))
        raise self.watch.parted(
            f"the ranks went different ways: {asked}. Steps, and what is done with param.grad, are "
            "for all ranks alike: take them out of what only one rank runs"
        )

    def _texts(self, mine: str) -> list[str]:
        said = mine.encode()[:_MAX_TEXT_NBYTES].ljust(_MAX_TEXT_NBYTES, b"\0")
        rows = self._gather(torch.frombuffer(bytearray(said), dtype=torch.uint8))
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]

    def combine(self, parts: torch.Tensor, name: str) -> torch.Tensor:
        """Return the whole of the tensor `name`, of which each rank of this shard group has its
        part, and zeros for the rest. Bit for bit, in place."""
        moved, wide = parts.cpu(), parts.element_size() == 4
        bits = moved.view(torch.int32) if wide else moved.view(torch.int16).to(torch.int32)
        if self.sharding.replica:  # every replica has the whole: one of them is enough
            bits.zero_()
        with self._together(f"the all-reduce of the parts of {name}"):
            dist.all_reduce(bits, group=self.control)
        if not wide:
            bits = bits.to(torch.int16)
        return bits.view(parts.dtype).to(parts.device)

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the first rank's values of a tensor; all ranks have one of this shape."""
        moved = tensor.detach().to("cpu", copy=True).contiguous()
        with self._together("the broadcast of initial values"):
            dist.broadcast(moved.view(-1).view(torch.uint8), group=self.control, group_src=0)
        return moved.to(tensor.device)

    def as_on_first(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the first rank's values of each floating-point tensor. Tensors with the same bits
        on all ranks already (a model made under one seed, files that were copied) are not sent."""
        rows = self.exchange([_digest(each) for each in tensors], "first values")
        alike = (rows == rows[0]).all(axis=0)
        return [
            tensor if same else self.from_first(tensor.float())
            for tensor, same in zip(tensors, alike, strict=True)
        ]

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor (1D) to another rank, which must `receive` it."""
        with self._between(self.rank, to) as limit:
            self.control.send([tensor.cpu().contiguous()], to, 0).wait(limit)

    def receive(self, numel: int, dtype: torch.dtype, source: int) -> torch.Tensor:
        """Return a tensor that another rank sends, in host memory."""
        received = torch.empty(numel, dtype=dtype)
        with self._between(source, self.rank) as limit:
            self.control.recv([received], source, 0).wait(limit)
        return received

    def all_succeeded(self, error: BaseException | None) -> str | None:
        """Return the first failing rank's error; None if all ranks succeeded."""
        text = "" if error is None else f"{type(error).__name__}: {error}"
        if not self.exchange([bool(text)], "whether all have succeeded").any():
            return None
        with self._together("the all-gather of what went wrong"):
            texts = enumerate(self._texts(text))
        return next(f"rank {rank}: {words}" for rank, words in texts if words)

    def _between(self, source: int, to: int) -> AbstractContextManager[timedelta]:
        source, to = (dist.get_global_rank(self.control, each) for each in (source, to))
        what = f"the sending of tensors from rank {source} to rank {to}"
        return self.watch.during(what, members=(source, to), beside=self.beside)


def _digest(tensor: torch.Tensor) -> int:
    """Return a digest of a tensor's format and values, of 63 bits."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return (xxhash.xxh3_64_intdigest(flat.numpy().data) ^ crc32(str(tensor.dtype).encode())) >> 1


def start_world(device: torch.device, timeout_s: float) -> bool:
    """Make the process group that the environment asks for (`torchrun`), if there is none yet and
    it has several ranks. True if one was made."""
    if not dist.is_available() or dist.is_initialized():
        return False
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return False
    backend = "gloo"
    if accelerator.is_accelerator(device):
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        world, rank = (os.environ.get(name, "?") for name in ("WORLD_SIZE", "RANK"))
        raise RankError(
            f"rank {rank}: the meeting of {world} ranks at {os.environ.get('MASTER_ADDR', '?')} "
            f"port {os.environ.get('MASTER_PORT', '?')} failed: {error}; see that all of them are "
            f"started within zero.timeout_s ({timeout_s:g})"
        ) from error
    return True


def data_ranks(members: DeviceMesh | None) -> list[int]:
    """Return the ranks, as the world counts them, that get different data: those of `members`, or
    all.

    Raises ConfigError if `members` is no line of ranks with this one in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [0]
    if members is None:
        return list(range(dist.get_world_size()))
    ranks = [int(rank) for rank in members.mesh.flatten()]
    if members.ndim != 1 or dist.get_rank() not in ranks:
        raise ConfigError(
            f"mesh: {members} is not one dimension of ranks with rank {dist.get_rank()} in it; "
            'give the data-parallel dimension of a larger mesh: mesh["dp"]'
        )
    return ranks


def _group_of(ranks: Sequence[int], limit: timedelta, backend: str | None = None) -> Group:
    """Return a process group made by its own ranks alone, this one among them."""
    group: Group | None = dist.new_group(
        list(ranks), timeout=limit, backend=backend, use_local_synchronization=True
    )
    assert group is not None, "this rank is one of them"
    return group
