"""Parameters that several ranks share: both kinds of state pass the conformance class, and gather
what other ranks have."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from offload.swap.device.fences import Fences
from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import State
from offload.swap.threads.transfer import Transfer
from offload.zero.groups.layout import Layout, ParamShape, lay_out
from offload.zero.ranks.gathered import GatheredState, Gatherer, ReplicatedState
from offload.zero.ranks.ranks import Ranks
from offload.zero.ranks.sharding import Part
from tests.ranks.processes import run_ranks
from tests.swap.state_conformance import (
    NBYTES,
    FileHomeConformance,
    Places,
    StateConformance,
    content,
    fill,
    make_places,
)

CPU = torch.device("cpu")
ITEMSIZE = 4
ALONE = lay_out([ParamShape(("w",), (NBYTES // ITEMSIZE - 256,)), ParamShape(("b",), (256,))])


@dataclass
class Shared:
    """One rank's gatherer, and the states it gathers."""

    gatherer: Gatherer
    ranks: Ranks
    held: set[str] = field(default_factory=set)  # names of states that a module has entered
    updates: dict[str, Transfer[None]] = field(default_factory=dict)  # pending, by name

    def gathered(self, home: State, layout: Layout = ALONE) -> GatheredState:
        return GatheredState(
            home, self._part(layout), ITEMSIZE, self.gatherer,
            lambda: self.updates.get(home.name), lambda: home.name in self.held,
        )  # fmt: skip

    def replicated(self, home: State, layout: Layout = ALONE) -> ReplicatedState:
        return ReplicatedState(
            home, self._part(layout), ITEMSIZE, self.gatherer,
            lambda: self.updates.get(home.name), self.ranks.sharding.rank,
        )  # fmt: skip

    def _part(self, layout: Layout) -> Part:
        return Part.of(layout, self.ranks.sharding.rank)


@contextmanager
def shared(pool: SlotPool, room_nbytes: int) -> Iterator[Shared]:
    ranks = Ranks.meet(3, None, CPU, timeout_s=30)
    gatherer = Gatherer(ranks.collectives(), pool, room_nbytes, CPU, Fences())
    try:
        yield Shared(gatherer, ranks)
    finally:
        gatherer.order.close()
        ranks.watch.close()


@pytest.fixture
def _one_rank() -> Iterator[None]:
    """A world of its own per test: its groups' connections close with it, not with an engine."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class OneRank(StateConformance):
    """What is gathered from one rank is its own shard: the whole way but for other ranks' bytes."""

    @pytest.fixture
    def places(self, tmp_path: Path, _one_rank: None) -> Iterator[Places]:
        for places in make_places(tmp_path):
            with shared(places.device, 2 * NBYTES) as self.shared:
                yield places
            del self.shared

    def begin_update(self, state: State) -> None:
        assert isinstance(state, GatheredState | ReplicatedState)
        state.invalidate_gathered()


class TestGatheredFromMemory(OneRank):
    has_blank = False
    is_undone_before_reads = True

    def make(self, places: Places, name: str) -> State:
        return self.shared.gathered(places.in_memory(name))


class TestGatheredFromAFile(TestGatheredFromMemory, FileHomeConformance):
    def make(self, places: Places, name: str) -> State:
        return self.shared.gathered(places.in_file(name))


class TestReplicatedInMemory(OneRank):
    def make(self, places: Places, name: str) -> State:
        return self.shared.replicated(places.in_memory(name))


class TestReplicatedInAFile(OneRank, FileHomeConformance):
    def make(self, places: Places, name: str) -> State:
        return self.shared.replicated(places.in_file(name))


# ------------------------------------------------------------------ which copies are kept
# Room for two whole copies. What is kept follows from the order of uses alone.
@pytest.fixture
def bench(tmp_path: Path, _one_rank: None) -> Iterator[tuple[Places, Shared]]:
    for places in make_places(tmp_path):
        with shared(places.device, 2 * NBYTES) as world:
            yield places, world


def three(places: Places, world: Shared) -> list[GatheredState]:
    """Filled with `content(0)`, `content(1)`, `content(2)`."""
    states = [world.gathered(places.in_memory(f"group {number}")) for number in range(3)]
    for number, state in enumerate(states):
        fill(state, content(number, NBYTES))
    return states


def test_a_view_of_a_copy_that_was_given_up_keeps_its_memory_until_it_is_gone(
    bench: tuple[Places, Shared],
) -> None:
    places, world = bench
    states = three(places, world)
    view = states[0].tensor()
    world.gatherer.begin_pass()
    account = places.device.tier.account
    assert not states[0].is_gathered
    assert account.used_nbytes == NBYTES
    for state in states:
        state.tensor()
    assert torch.equal(view, content(0, NBYTES))
    world.gatherer.begin_pass()
    del view
    for _ in range(2):
        for state in states:
            state.tensor()  # in three slots: the view's is one of them again
    assert account.peak_nbytes == 3 * NBYTES


# ------------------------------------------------------------------ several ranks
SHAPES = [
    ParamShape(("w",), (3000,)), ParamShape(("b",), (77,)),
    ParamShape(("frozen",), (2500,), trainable=False),
]  # fmt: skip


def whole(version: int, layout: Layout) -> torch.Tensor:
    return content(version, layout.numel * ITEMSIZE)


def part(values: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """What a rank owns: its part of what is trained, and of what is not."""
    cut = layout.numel_trainable * ITEMSIZE
    trained, frozen = layout.shard_trainable * ITEMSIZE, layout.shard_frozen * ITEMSIZE
    own = values[:cut][rank * trained : (rank + 1) * trained]
    return torch.cat([own, values[cut:][rank * frozen : (rank + 1) * frozen]])


def gather_and_write(folder: str) -> list[torch.Tensor]:
    """Each rank has its shard of version 0; the ranks write versions 1 and 2 on two ways. What this
    rank computes with after each."""
    rank, count = dist.get_rank(), dist.get_world_size()
    layout, seen = lay_out(SHAPES, count), []
    for places in make_places(Path(folder)):
        with shared(places.device, 4 * layout.numel * ITEMSIZE) as world:
            state = world.gathered(places.in_memory("g", layout.shard_numel * ITEMSIZE), layout)
            fill(state, part(whole(0, layout), layout, rank))
            seen.append(state.tensor().clone())
            state.tensor().copy_(whole(1, layout))  # as `gathered` does it on every rank
            state.mark_dirty()
            state.invalidate_gathered()
            seen.append(state.tensor().clone())
            trained = slice(0, layout.shard_trainable * ITEMSIZE)
            for piece in range(state.pieces):
                span = state.span(piece)
                span = slice(span.start, min(span.stop, trained.stop))
                here = state.host_piece(piece).wait()[: max(0, span.stop - span.start)]
                here.copy_(part(whole(2, layout), layout, rank)[span])
                state.mark_piece_dirty(piece)
            state.invalidate_gathered()
            seen.append(state.tensor().clone())
            state.close()
    return seen


def update_and_refresh(folder: str) -> list[torch.Tensor]:
    """All ranks have all of version 0. Each of them updates its own trainable part to version 1;
    then each is given a whole version of its own."""
    rank, count = dist.get_rank(), dist.get_world_size()
    layout, seen = lay_out(SHAPES, count), []
    own = layout.shard_trainable * ITEMSIZE
    for places in make_places(Path(folder)):
        with shared(places.device, 0) as world:
            cut = layout.numel_trainable * ITEMSIZE
            home = places.in_memory("g", layout.numel * ITEMSIZE, cut, own)
            state = world.replicated(home, layout)
            state.blank().copy_(whole(0, layout))
            state.mark_dirty()
            seen.append(state.tensor().clone())
            done = 0
            for piece in range(home.pieces):  # counted from this rank's first one
                span = state.span(piece)
                if done == own:
                    break
                assert span.start == rank * own + done
                state.host_piece(piece).wait().copy_(whole(1, layout)[span])
                state.mark_piece_dirty(piece)
                done += span.stop - span.start
            state.invalidate_gathered()
            assert state.is_outdated
            seen.append(state.tensor().clone())
            assert not state.is_outdated
            fill(state, whole(10 + rank, layout))
            seen.append(state.tensor().clone())
            state.close()
    return seen


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("program", [gather_and_write, update_and_refresh])
def test_each_rank_has_what_all_wrote_and_keeps_its_part(
    tmp_path: Path, count: int, program: Callable[[str], list[torch.Tensor]]
) -> None:
    """Shards, of which a trained part was updated after a write of all; replicas, which get the
    other ranks' parts after an update, and after each was overwritten."""
    layout = lay_out(SHAPES, count)
    cut = layout.numel_trainable * ITEMSIZE
    first, second, third = (whole(version, layout) for version in range(3))
    parts = [part(whole(10 + rank, layout), layout, rank) for rank in range(count)]
    own = layout.shard_trainable * ITEMSIZE
    expected = {
        gather_and_write: (first, second, torch.cat([third[:cut], second[cut:]])),
        update_and_refresh: (
            first, torch.cat([second[:cut], first[cut:]]),
            torch.cat([*(each[:own] for each in parts), *(each[own:] for each in parts)]),
        ),
    }[program]  # fmt: skip
    for seen in run_ranks(count, tmp_path, program, str(tmp_path)):
        assert all(torch.equal(*pair) for pair in zip(seen, expected, strict=True))
