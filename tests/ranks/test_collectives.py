"""What collectives compute, against plain sums over what every rank has."""

import pytest
import torch
from torch import Tensor

from offload.zero.groups.layout import SHARD_ALIGN_NUMEL, ParamShape, lay_out
from offload.zero.ranks.collectives import Collectives, Workspace
from offload.zero.ranks.sharding import Part
from tests.ranks.threads import run_threads

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
