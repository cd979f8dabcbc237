"""What collectives compute, against plain sums over what every rank has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offload.zero.groups.layout import SHARD_ALIGN_NUMEL, ParamShape, lay_out
from offload.zero.ranks.block_codes import BlockCodes, add_decoded, decode, encode
from offload.zero.ranks.collectives import Collectives, Wire, Workspace
from offload.zero.ranks.sharding import CODE_BLOCK_NUMEL, Part, Sharding, codes_nbytes, scales_numel
from tests.ranks.threads import run_threads

WORLDS = [(1, 1), (2, 2), (3, 3), (4, 4), (8, 8), (4, 1), (4, 2), (6, 3), (6, 2)]


def workspace(numel: int, ranks: int, received_nbytes: int) -> Workspace:
    byte = {"dtype": torch.uint8}
    return Workspace(torch.empty(received_nbytes, **byte), torch.empty(numel // ranks * 4, **byte))


def contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(numel, generator=generator) * 10.0 ** (rank % 5)).to(dtype)


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

    found = run_threads(world_size, ranks, reduce, Wire())
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
    for rank, own in enumerate(found):
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

    for rank, both in enumerate(run_threads(world_size, ranks, gather, Wire())):
        first = rank // ranks * ranks
        expected = torch.arange(first + 1, first + ranks + 1).repeat_interleave(40)
        assert all(torch.equal(each.long(), expected) for each in both)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_codes_are_off_by_half_a_scale_and_the_same_on_every_rank(world_size: int) -> None:
    step = SHARD_ALIGN_NUMEL
    numel = step * world_size

    def gather(rank: int, collectives: Collectives) -> tuple[Tensor, Tensor]:
        whole, own = torch.empty(numel), contribution(rank, step, torch.float32)
        room = torch.empty(codes_nbytes(numel), dtype=torch.uint8)
        codec = BlockCodes(torch.float32)
        collectives.gather_coded(whole.view(torch.uint8), own.view(torch.uint8), "g", codec, room)
        summed = collectives.reduce(
            contribution(rank, numel, torch.float32),
            workspace(numel, world_size, 2 * codes_nbytes(numel)),
            "g",
        )
        return whole, summed.clone()

    found = run_threads(world_size, world_size, gather, Wire(quantized_gradients=True))
    exact = torch.cat([contribution(rank, step, torch.float32) for rank in range(world_size)])
    scales = exact.view(-1, CODE_BLOCK_NUMEL).abs().amax(dim=1) / 127
    bound = scales.repeat_interleave(CODE_BLOCK_NUMEL) * 0.501
    for whole, _ in found:
        assert torch.equal(whole, found[0][0])
        assert bool(((whole - exact).abs() <= bound).all())
    given = torch.stack([contribution(r, numel, torch.float32) for r in range(world_size)])
    largest = given.view(world_size, -1, CODE_BLOCK_NUMEL).abs().amax(dim=2) / 127
    bound = largest.sum(dim=0).repeat_interleave(CODE_BLOCK_NUMEL) * 0.501 / world_size
    averages = torch.cat([summed for _, summed in found])
    assert bool(((averages - given.mean(dim=0)).abs() <= bound).all())
    assert not torch.equal(averages, given.mean(dim=0))  # approximate it is


@pytest.mark.parametrize("numel", [256, 2048, (1 << 20) + 512])
def test_codes_keep_zeros_and_what_is_not_finite(numel: int) -> None:
    values = contribution(0, numel, torch.float32)
    values[:CODE_BLOCK_NUMEL] = 0
    if numel > 2 * CODE_BLOCK_NUMEL:
        values[CODE_BLOCK_NUMEL] = torch.inf
        values[2 * CODE_BLOCK_NUMEL] = torch.nan
    codes, scales = torch.empty(numel, dtype=torch.int8), torch.empty(scales_numel(numel))
    given = values.clone()
    encode(values, codes, scales)
    assert torch.equal(values.nan_to_num(7), given.nan_to_num(7))
    out, added = torch.empty(numel), torch.ones(numel)
    decode(codes, scales, out)
    add_decoded(codes, scales, added)
    assert not out[:CODE_BLOCK_NUMEL].any()
    if numel > 2 * CODE_BLOCK_NUMEL:
        assert out[CODE_BLOCK_NUMEL : 3 * CODE_BLOCK_NUMEL].isnan().all()
        assert added[CODE_BLOCK_NUMEL : 3 * CODE_BLOCK_NUMEL].isnan().all()
        assert out[3 * CODE_BLOCK_NUMEL :].isfinite().all()
    torch.testing.assert_close(added, out + 1, equal_nan=True)


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
        found = [each for part in parts for each in part.trained() if each.index == index]
        assert sum(each.spec.numel for each in found) == spec.numel
        start = 0
        for each in found:
            assert each.start == start
            start += each.spec.numel
    padding = layout.numel - lay_out(shapes).numel
    assert padding < 2 * ranks * SHARD_ALIGN_NUMEL


@pytest.mark.parametrize(
    ("stage", "group", "world", "expected"),
    [(0, None, 6, (1, 6)), (1, None, 6, (6, 1)), (3, 2, 6, (2, 3)), (2, 6, 6, (6, 1))],
)
def test_a_stage_says_how_many_share_and_what_is_whole(
    stage: int, group: int | None, world: int, expected: tuple[int, int]
) -> None:
    found = [Sharding.of(stage, group, world, rank) for rank in range(world)]
    assert {(each.ranks, each.replicas) for each in found} == {expected}
    assert {(each.rank, each.replica) for each in found} == {
        (r, g) for r in range(expected[0]) for g in range(expected[1])
    }
    assert found[0].parameters is (stage == 3)
    assert found[0].gradients is (stage >= 2)
