"""Ranks as threads of one process: for the arithmetic of collectives, which takes milliseconds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from offload.zero.ranks.collectives import Collectives

if not hasattr(ThreadLocalWorld, "comms"):  # torch 2.11 forgot them; the end of a group asks
    ThreadLocalWorld.comms = property(lambda self: [])


class Unwatched:
    """In the place of a `RankWatch`: threads of one process do not die alone."""

    @contextmanager
    def during(self, what: str, *groups: Any, **_: Any) -> Iterator[timedelta]:
        yield timedelta(seconds=30)


def run_threads(
    world_size: int, ranks: int, function: Callable[[int, Collectives], Any]
) -> list[Any]:
    """What `function(rank, collectives)` returns on each of `world_size` threads, of which
    neighbours form shard groups of `ranks`. Raises what any of them raises."""
    results: list[Any] = [None] * world_size

    @spawn_threads_and_init_comms(world_size=world_size)  # type: ignore[untyped-decorator]
    def run(self: object) -> None:
        rank = dist.get_rank()
        shards = [list(range(s, s + ranks)) for s in range(0, world_size, ranks)]
        replicas = [list(each) for each in zip(*shards, strict=True)]
        groups = [dist.new_subgroups_by_enumeration(each)[0] for each in (shards, shards, replicas)]
        results[rank] = function(rank, Collectives(*groups, Unwatched()))

    run(object())
    return results
