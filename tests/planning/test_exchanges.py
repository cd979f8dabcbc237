"""The predicted collectives of a step and their seconds (tests/ranks/test_rank_bytes.py compares
them with the calls of real ranks)."""

from __future__ import annotations

import pytest

from offload.config import OffloadConfig
from offload.planning.machine.speeds import Network
from offload.planning.step.exchanges import step_collectives
from offload.planning.step.program import Verb
from offload.zero.groups.discovery import discover
from offload.zero.ranks.sharding import Sharding
from tests.offload.engine_cases import TinyLM

PLAIN = OffloadConfig.load({"precision": "fp32"})
SHAPE = discover(TinyLM(12), ()).shape()
NETWORK = Network(8, 400e9, 320e9)


@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_twice_the_parameters_travel_and_three_times_under_stage_3(ranks: int) -> None:
    def nbytes(stage: int) -> tuple[int, int]:
        sharding = Sharding.of(stage, None, ranks, 0)
        gathers, reductions = step_collectives(PLAIN, SHAPE, sharding, 1)
        groups = SHAPE.sharded(sharding.ranks, sharding.replicas).groups
        moved = sum(each.nbytes for each in (*gathers, *reductions))
        return moved, 4 * sum(group.layout.numel_trainable for group in groups)

    for stage in (1, 2):
        moved, trainable = nbytes(stage)
        assert moved == 2 * trainable
    moved, trainable = nbytes(3)
    frozen = 2 * 12 * 4 * ranks * 2048  # of every block, in both directions
    assert 2.6 * trainable < moved <= 3 * trainable + frozen


def test_a_rank_alone_calls_nothing() -> None:
    assert step_collectives(PLAIN, SHAPE, Sharding.of(3, None, 1, 0), 2) == ([], [])


@pytest.mark.parametrize("passes", [1, 3])
def test_every_pass_is_reduced_and_updates_are_gathered_once(passes: int) -> None:
    trained = sum(group.layout.numel_trainable > 0 for group in SHAPE.groups)
    gathers, reductions = step_collectives(PLAIN, SHAPE, Sharding.of(2, None, 4, 0), passes)
    assert len(reductions) == passes * trained
    assert len(gathers) == trained
    order = [each.group for each in reductions[:trained]]
    assert [each.group for each in gathers] == order[::-1]
    assert all(each.action.verb is Verb.GRADIENT for each in reductions)


def test_bytes_pass_the_slower_of_two_links() -> None:
    nbytes = 8 << 30
    inside = NETWORK.seconds(nbytes, 8, apart=1, to_each=False)
    assert inside == pytest.approx(nbytes * 7 / 8 / 400e9)
    across = NETWORK.seconds(nbytes, 64, apart=1, to_each=False)
    assert across == pytest.approx(nbytes * 56 / 64 / 320e9)
    # nothing is summed on the way: each of 8 ranks has an eighth of the network
    to_each = NETWORK.seconds(nbytes, 64, apart=1, to_each=True)
    assert to_each == pytest.approx(8 * across)
    # replicas 8 places apart are on other machines, which they share with other replicas
    replicas = NETWORK.seconds(nbytes, 8, apart=8, to_each=False)
    assert replicas == pytest.approx(8 * nbytes * 7 / 8 / 320e9)
    assert NETWORK.seconds(nbytes, 1, apart=1, to_each=False) == 0.0
