"""What collectives compute, against plain sums over what every rank has. Ranks are threads of one
process here, which takes milliseconds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from offload.zero.groups.layout import SHARD_ALIGN_NUMEL, ParamShape, lay_out
from offload.zero.ranks.collectives import Collectives, Workspace
from offload.zero.ranks.sharding import Part

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


WORLDS = [(1, 1), (2, 2), (3, 3), (4, 4), (8, 8), (4, 1), (4, 2), (6, 3), (6, 2)]


def workspace(numel: int, ranks: int, received_nbytes: int) -> Workspace:
    byte = {"dtype": torch.uint8}
    return Workspace(torch.empty(received_nbytes, **byte), torch.empty(numel // ranks * 4, **byte))


def contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(numel, generator=generator) * 10.0 ** (rank % 5)).to(dtype)


@pytest.mark.sample(7)
@pytest.mark.parametrize("room", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("world_size", "ranks"), WORLDS)
def test_a_reduction_is_the_sum_in_the_order_of_ranks_divided_once(
    world_size: int, ranks: int, dtype: torch.dtype, room: float
) -> None:
    """`room`: of what a contribution takes; with less, it travels in pieces."""
    numel = 2 * SHARD_ALIGN_NUMEL * world_size

    def reduce(rank: int, collectives: Collectives) -> Tensor:
        memory = workspace(numel, ranks, int(numel * dtype.itemsize * room) // 4 * 4)
        return collectives.reduce(contribution(rank, numel, dtype), memory, "g").clone()

    reduced = run_threads(world_size, ranks, reduce)
    given = [contribution(rank, numel, dtype).float() for rank in range(world_size)]
    of_groups = []
    for first in range(0, world_size, ranks):
        total = given[first].clone()
        for each in given[first + 1 : first + ranks]:
            total += each
        of_groups.append(total)
    expected = of_groups[0]
    for each in of_groups[1:]:
        expected = expected + each
    expected = expected / world_size
    shards = expected.view(ranks, -1)
    for rank, own in enumerate(reduced):
        assert torch.equal(own, shards[rank % ranks])


@pytest.mark.parametrize(("world_size", "ranks"), WORLDS)
def test_a_gathering_puts_shards_in_the_order_of_ranks(world_size: int, ranks: int) -> None:
    def gather(rank: int, collectives: Collectives) -> list[Tensor]:
        own = torch.full((40,), rank + 1, dtype=torch.uint8)
        apart, in_place = torch.zeros(2, 40 * ranks, dtype=torch.uint8)
        collectives.gather(apart, own, "apart")
        place = in_place.view(ranks, -1)[rank % ranks]
        place.copy_(own)
        collectives.gather(in_place, place, "in place")
        return [apart, in_place]

    for rank, both in enumerate(run_threads(world_size, ranks, gather)):
        first = rank // ranks * ranks
        expected = torch.arange(first + 1, first + ranks + 1).repeat_interleave(40)
        assert all(torch.equal(each.long(), expected) for each in both)


# ------------------------------------------------------------------------- shards
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 64])
def test_shards_tile_every_group_and_parts_tile_every_parameter(ranks: int) -> None:
    shapes = [
        ParamShape(("a",), (5000, 3)), ParamShape(("b",), ()), ParamShape(("empty",), (0, 4)),
        ParamShape(("frozen",), (777,), trainable=False), ParamShape(("c",), (1,)),
    ]  # fmt: skip
    layout = lay_out(shapes, ranks)
    parts = [Part.of(layout, rank) for rank in range(ranks)]
    covered = [element for part in parts for element in part.trainable]
    assert covered == list(range(layout.numel_trainable))
    frozen = [element for part in parts for element in part.frozen]
    assert frozen == list(range(layout.numel_trainable, layout.numel))
    for index, spec in enumerate(layout.params):
        if not spec.trainable:
            continue
        pieces = [each for part in parts for each in part.trained() if each.index == index]
        assert sum(each.spec.numel for each in pieces) == spec.numel
        start = 0
        for each in pieces:
            assert each.start == start
            start += each.spec.numel
    padding = layout.numel - lay_out(shapes).numel
    assert padding < 2 * ranks * SHARD_ALIGN_NUMEL
