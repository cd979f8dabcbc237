"""Gradients of several ranks, against plain averages over what each rank gave.

All programs of a world size run in one set of processes; each is judged by a test of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offload.kernels.floats import Float, serial
from offload.swap.device.fences import Fences
from offload.swap.states.state import MemoryState
from offload.swap.states.trace import Trace
from offload.zero.gradients.gradients import GradientAccumulator
from offload.zero.groups.layout import ParamShape, lay_out
from offload.zero.ranks.collectives import Workspace
from offload.zero.ranks.rank_weights import SharedMemory
from offload.zero.ranks.ranks import Ranks
from offload.zero.ranks.reduction import ReducedGradients, SharedReductions
from offload.zero.ranks.sharding import Part
from tests.ranks.processes import run_ranks
from tests.swap.state_conformance import Places, make_places

CPU = torch.device("cpu")
NUMELS = [[900, 30], [4500], [17], [2000]]  # of each group's parameters
Place = tuple[int, int]  # a group, and a parameter in it
ALL = [(group, index) for group, numels in enumerate(NUMELS) for index in range(len(numels))]
BACKWARD = ALL[::-1]


@dataclass
class Given:
    """What one rank gave, and what it has of the result."""

    gradients: dict[Place, list[Tensor]] = field(default_factory=dict)  # by pass
    parts: dict[Place, tuple[int, Tensor]] = field(default_factory=dict)  # and where each begins
    present: dict[Place, bool] = field(default_factory=dict)  # a gradient, of any rank
    notes: list[Any] = field(default_factory=list)


class Rank:
    """Reductions of one rank, with all they stand on."""

    def __init__(
        self, places: Places, *, stage: int = 2, dtype: Float = Float.FP32,
        in_backward: bool = False,
    ) -> None:  # fmt: skip
        self.places = places
        self.ranks = Ranks.meet(stage, None, CPU, timeout_s=30)
        self.dtype = torch.bfloat16 if dtype is Float.BF16 else torch.float32
        self.given = Given()
        self.groups = [self._group(index, numels, dtype) for index, numels in enumerate(NUMELS)]
        most = max(group.numel for group in self.groups)
        room = Workspace(*(torch.empty(4 * most, dtype=torch.uint8) for _ in range(2)))
        self.reductions = SharedReductions(
            self.groups, self.ranks, self.ranks.collectives(),
            SharedMemory(places.device, 0, room, Fences()), self.dtype, torch.float32, Trace(),
            wait_for_complete_groups=in_backward,
        )  # fmt: skip

    def _group(self, index: int, numels: Sequence[int], dtype: Float) -> ReducedGradients:
        sharding = self.ranks.sharding
        shapes = [ParamShape((f"{index}.{n}",), (numel,)) for n, numel in enumerate(numels)]
        layout = lay_out(shapes, sharding.ranks)
        part = Part.of(layout, sharding.rank)

        def accumulator(specs: Any, numel: int) -> GradientAccumulator:
            def make(itemsize: int) -> MemoryState:
                return self.places.in_memory(f"gradients of {index}", numel * itemsize)

            return GradientAccumulator(
                f"group {index}", list(specs), dtype, Float.FP32, make, serial
            )

        own = accumulator((each.spec for each in part.trained()), len(part.trainable))
        return ReducedGradients(
            index, part, own, lambda: accumulator(layout.params, layout.numel), lambda: None
        )

    @property
    def number(self) -> int:
        return self.ranks.rank

    def give(self, places: Sequence[Place], seed: int) -> None:
        """Backward has made these gradients."""
        for group, index in places:
            generator = torch.Generator().manual_seed(
                seed + 10 * group + 100 * index + 1000 * self.number
            )
            gradient = torch.randn(NUMELS[group][index], generator=generator).to(self.dtype)
            self.groups[group].add(index, gradient)
            self.given.gradients.setdefault((group, index), []).append(gradient)

    def step(self) -> Given:
        """What there is before a step."""
        self.reductions.agree("a step")
        for group in self.groups:
            for part in group.parts:
                found = group.read(part.index)
                if found is not None:
                    self.given.parts[group.index, part.index] = part.start, found.reshape(-1)
            for index, passes in enumerate(group.passes):
                self.given.present[group.index, index] = bool(passes)
        return self.given


@contextmanager
def rank(folder: Path, **options: Any) -> Iterator[Rank]:
    for places in make_places(folder):
        found = Rank(places, **options)
        try:
            yield found
        finally:
            for order in found.reductions.orders():
                order.drain(10)
                order.close()
            found.ranks.watch.close()


# ------------------------------------------------------------------ programs
def one_pass(folder: Path) -> Given:
    with rank(folder) as here:
        here.give(BACKWARD, 0)
        given = here.step()
        given.notes = [
            here.places.device.tier.account.peak_nbytes,
            max(group.numel * 4 for group in here.groups),
            here.reductions.forward_order,
        ]
        return given


def every_rank_in_another_order(folder: Path) -> Given:
    with rank(folder) as here:
        for step in range(3):
            turn = (here.number + step) % len(BACKWARD)
            here.give([*BACKWARD[turn:], *BACKWARD[:turn]], 7 * step)
            given = here.step()
            here.reductions.discard()
            given.notes.append(here.reductions.forward_order)
            if step < 2:
                given.gradients.clear()
                for group in here.groups:
                    group.clear()
        return given


def branches(folder: Path) -> Given:
    """Two passes. The first rank never comes to group 1, nobody to the first parameter of group
    0."""
    with rank(folder) as here:
        mine = [place for place in BACKWARD if place != (0, 0)]
        if here.number == 0:
            mine.remove((1, 0))
        here.give(mine, 0)
        here.give(mine, 50)  # another pass
        return here.step()


def kept_passes(folder: Path) -> Given:
    """Two passes stay here, the third one is reduced, with them. 16-bit gradients."""
    with rank(folder, dtype=Float.BF16) as here:
        for number in range(3):
            here.reductions.synchronising = number == 2
            here.give(BACKWARD, 50 * number)
        return here.step()


def cleared_on_all(folder: Path) -> Given:
    """Of two passes, one gradient is cleared between them and comes again, another does not."""
    with rank(folder) as here:
        here.give(BACKWARD, 0)
        here.reductions.finish()
        for place in ((0, 1), (2, 0)):
            here.reductions.clear(place[0], [place[1]])
            here.groups[place[0]].drop([place[1]])
            here.given.gradients[place] = []
        here.give([(3, 0), (0, 1)], 50)
        return here.step()


def skipped_groups(folder: Path) -> Given:
    """The first rank goes through backward to group 0 without gradients of those before it, on
    which the others wait."""
    with rank(folder, stage=3) as here:
        if here.number == 0:
            here.reductions.reduce_skipped_groups(0)
        else:
            here.give([(3, 0), (2, 0)], 0)
        for group in (3, 2):
            here.groups[group].landed.wait()
        dist.barrier()  # the first rank comes no further before the others do
        here.give([(1, 0), (0, 0), (0, 1)], 0)
        return here.step()


def updated_in_backward(folder: Path) -> Given:
    """Groups are told when they are on their way, in a round that is completed and in one that is
    dropped."""
    with rank(folder, in_backward=True) as here:
        told = here.given.notes
        here.reductions.when_issued(3, lambda: told.append("3"))
        told.append("before")
        here.give([(3, 0)], 0)
        here.reductions.when_issued(0, lambda: told.append("0"))
        here.give([(0, 1), (2, 0), (1, 0)], 0)
        told.append("incomplete")
        here.give([(0, 0)], 0)
        here.reductions.finish()
        here.reductions.when_issued(2, lambda: told.append("never"))
        here.reductions.discard()
        here.give([(2, 0)], 0)
        here.reductions.finish()
        return Given(notes=told)


def written(folder: Path) -> Given:
    """What users write and scale is the gradient."""
    with rank(folder) as here:
        here.give([(1, 0), (2, 0)], 0)
        here.step()
        whole = torch.arange(float(NUMELS[0][0]))
        here.groups[0].write(0, whole)
        here.groups[0].scale(0, 0.5)
        here.given = Given()
        squares = [group.square(0) for group in here.groups]
        given = here.step()
        given.notes = [squares[0], here.groups[0].holds_any]
        here.groups[1].clear()
        given.notes.append(here.groups[1].holds_any)
        return given


PROGRAMS: list[Callable[[Path], Given]] = [
    one_pass, every_rank_in_another_order, branches, kept_passes, cleared_on_all,
    skipped_groups, updated_in_backward, written,
]  # fmt: skip


def run_all(folder: str) -> dict[str, Given]:
    torch.set_num_threads(1)
    found = {}
    for program in PROGRAMS:
        own = Path(folder) / f"{program.__name__}-{dist.get_rank()}"
        own.mkdir()
        found[program.__name__] = program(own)
        dist.barrier()
    return found


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda count: f"{count} ranks")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Given]]:
    """What every rank has, by program."""
    folder = tmp_path_factory.mktemp("ranks")
    answers = run_ranks(request.param, folder, run_all, str(folder))
    return {name: [each[name] for each in answers] for name in answers[0]}


# ------------------------------------------------------------------ what they come to
def average(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for each in parts[1:]:
        total += each
    return total / len(parts)


def whole(given: Sequence[Given], place: Place) -> Tensor:
    """The result, of all ranks' parts; NaN where no rank has anything."""
    found = torch.full((NUMELS[place[0]][place[1]],), torch.nan)
    for each in given:
        if place in each.parts:
            start, part = each.parts[place]
            assert found[start : start + part.numel()].isnan().all(), "one rank's part alone"
            found[start : start + part.numel()] = part
    return found


def passes_of(given: Given, place: Place) -> list[Tensor]:
    return [each.float() for each in given.gradients.get(place, [])]


def check_averages(
    given: Sequence[Given], places: Sequence[Place] = ALL, rtol: float = 0.0
) -> None:
    """The average of all that every rank gave; bit for bit where it comes from one reduction."""
    for place in places:
        nothing = torch.zeros(NUMELS[place[0]][place[1]])
        sums = [sum(passes_of(each, place), start=nothing) for each in given]
        found = whole(given, place)
        torch.testing.assert_close(found, average(sums), rtol=rtol, atol=rtol, msg=str(place))
        assert all(each.present[place] for each in given)


def test_the_average_is_that_of_all_ranks_in_two_buckets(found: dict[str, list[Given]]) -> None:
    check_averages(found["one_pass"])
    for peak, largest, order in (each.notes for each in found["one_pass"]):
        assert peak <= 2 * largest
        assert order == [0, 1, 2, 3]


def test_ranks_may_get_gradients_in_any_order(found: dict[str, list[Given]]) -> None:
    given = found["every_rank_in_another_order"]
    check_averages(given, rtol=1e-6)  # what comes late is reduced in the step, and added
    orders = [each.notes for each in given]
    assert all(order == orders[0] for order in orders)
    turn = 2 % len(BACKWARD)  # the order in which the first rank's groups were complete
    last = dict.fromkeys(group for group, _ in reversed([*BACKWARD[turn:], *BACKWARD[:turn]]))
    assert orders[0][-1] == list(last)


def test_what_a_rank_did_not_use_counts_as_zero_and_what_no_rank_used_is_no_gradient(
    found: dict[str, list[Given]],
) -> None:
    given = found["branches"]
    for place in ALL:
        used = any(place in each.gradients for each in given)
        assert [each.present[place] for each in given] == [used] * len(given)
        if not used:
            assert whole(given, place).isnan().all()
            continue
        nothing = torch.zeros(NUMELS[place[0]][place[1]])
        by_pass = [
            average([(*passes_of(each, place), nothing, nothing)[number] for each in given])
            for number in range(2)
        ]
        torch.testing.assert_close(whole(given, place), by_pass[0] + by_pass[1])


def test_passes_that_stay_here_add_up_in_fp32_and_are_reduced_once(
    found: dict[str, list[Given]],
) -> None:
    check_averages(found["kept_passes"])
    assert all(len(each.gradients[1, 0]) == 3 for each in found["kept_passes"])


def test_a_gradient_that_all_ranks_clear_is_gone(found: dict[str, list[Given]]) -> None:
    given = found["cleared_on_all"]
    check_averages(given, [(0, 0), (0, 1), (1, 0)])
    assert [each.present[2, 0] for each in given] == [False] * len(given)
    assert whole(given, (2, 0)).isnan().all()
    both = [average([passes_of(each, (3, 0))[n] for each in given]) for n in range(2)]
    assert torch.equal(whole(given, (3, 0)), both[0] + both[1])


def test_ranks_that_wait_for_a_group_are_not_kept_by_one_that_skips_it(
    found: dict[str, list[Given]],
) -> None:
    given = found["skipped_groups"]
    check_averages(given, [place for place in ALL if len(given) > 1 or place[0] < 2])


def test_an_update_is_told_that_its_group_is_complete_and_not_that_it_was_dropped(
    found: dict[str, list[Given]],
) -> None:
    for each in found["updated_in_backward"]:
        assert each.notes == ["before", "3", "incomplete", "0"]


def test_what_users_write_is_each_ranks_part_and_counts_as_a_gradient(
    found: dict[str, list[Given]],
) -> None:
    given, expected = found["written"], torch.arange(float(NUMELS[0][0])) * 0.5
    assert torch.equal(whole(given, (0, 0)), expected)
    assert sum(each.notes[0] for each in given) == pytest.approx(float(expected.square().sum()))
    assert all(each.notes[1:] == [True, False] for each in given)
