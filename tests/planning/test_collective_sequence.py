"""The predicted collectives, against the code that makes them: one rank of 64 and of 4096.

`torch.distributed`'s fake backend stands for the others: every call returns at once, with what is
there. So the numbers that are trained mean nothing, and the calls are those of a large run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offload.config import OffloadConfig
from offload.planning.machine.network import Network
from offload.planning.step.collective_sequence import Among, Call, collective_sequence
from offload.planning.step.program import Verb
from offload.process.child import child_environment
from offload.zero.groups.discovery import discover
from offload.zero.ranks.sharding import Sharding
from tests.offload.engine_cases import TinyLM

ROOT = Path(__file__).parents[2]
BLOCKS = 5
PLAIN = OffloadConfig.load({"precision": "fp32"})


CASES: list[tuple[int, int, dict[str, Any], dict[str, Any]]] = [
    (64, 5, {"stage": 0}, {}),
    (64, 5, {"stage": 0}, {"precision": "bf16"}),
    (64, 63, {"stage": 1}, {}),
    (64, 63, {"stage": 2}, {"precision": "bf16", "micro_batches": 2}),
    (64, 5, {"stage": 2, "shard_group": 8}, {}),
    (64, 5, {"stage": 3}, {}),
    (64, 5, {"stage": 3}, {"gradient_accumulation_steps": 2}),
    (64, 17, {"stage": 3, "shard_group": 8}, {"precision": "bf16"}),
    (64, 9, {"reduce_dtype": "bf16"}, {}),
    (4096, 4095, {"stage": 3, "shard_group": 64}, {}),
    (4096, 7, {"stage": 3}, {}),
]


def keys_of(zero: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return {"precision": "fp32", "zero": zero, **more}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one rank calls in its third step, of every case: one process for all of them."""
    cases = [(world, rank, keys_of(zero, more)) for world, rank, zero, more in CASES]
    asked = json.dumps([cases, str(tmp_path_factory.mktemp("ranks"))])
    done = subprocess.run(
        [sys.executable, "-m", "tests.planning.fake_ranks_child", asked], cwd=ROOT, text=True,
        capture_output=True, check=False, timeout=240,
        env={**child_environment(), "LOCAL_WORLD_SIZE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize("case", range(len(CASES)))
def test_one_rank_of_many_calls_what_was_predicted(
    case: int, recorded: list[dict[str, Any]]
) -> None:
    world, rank, zero, more = CASES[case]
    keys, answer = keys_of(zero, more), recorded[case]
    config = OffloadConfig.load(keys)
    sharding = Sharding.of(config.zero.stage, config.zero.shard_group, world, rank)
    shape = discover(TinyLM(BLOCKS), ()).shape()
    passes = config.gradient_accumulation_steps
    found = collective_sequence(config, shape, sharding, passes)
    sizes = {Among.SHARDS: sharding.ranks, Among.REPLICAS: sharding.replicas}

    def calls(collectives: Any) -> list[list[Any]]:
        return [
            [str(exchange.call), sizes[exchange.among], exchange.nbytes]
            for each in collectives
            for exchange in each.exchanges
        ]

    assert answer["gathers"] == calls(found.gathers)
    assert answer["reductions"] == calls(found.reductions)
    layouts = [group.layout for group in shape.sharded(sharding.ranks, sharding.replicas).groups]
    assert answer["layouts"] == [[each.numel, each.numel_trainable, each.ranks] for each in layouts]


# ---------------------------------------------------------------- the arithmetic
SHAPE = discover(TinyLM(12), ()).shape()


@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_twice_the_parameters_travel_and_three_times_under_stage_3(ranks: int) -> None:
    def nbytes(stage: int) -> tuple[int, int]:
        sharding = Sharding.of(stage, None, ranks, 0)
        found = collective_sequence(PLAIN, SHAPE, sharding, 1)
        groups = SHAPE.sharded(sharding.ranks, sharding.replicas).groups
        return found.nbytes, 4 * sum(group.layout.numel_trainable for group in groups)

    for stage in (1, 2):
        moved, trainable = nbytes(stage)
        assert moved == 2 * trainable
    moved, trainable = nbytes(3)
    frozen = 2 * 12 * 4 * ranks * 2048  # of every block, in both directions
    assert 2.6 * trainable < moved <= 3 * trainable + frozen


def test_a_rank_alone_calls_nothing() -> None:
    found = collective_sequence(PLAIN, SHAPE, Sharding.of(3, None, 1, 0), 2)
    assert found.nbytes == 0
    assert not found.gathers
    assert not found.reductions


@pytest.mark.parametrize("passes", [1, 3])
def test_every_pass_is_reduced_and_updates_are_gathered_once(passes: int) -> None:
    trained = sum(group.layout.numel_trainable > 0 for group in SHAPE.groups)
    found = collective_sequence(PLAIN, SHAPE, Sharding.of(2, None, 4, 0), passes)
    assert len(found.reductions) == passes * trained
    assert len(found.gathers) == trained
    order = [each.group for each in found.reductions[:trained]]
    assert [each.group for each in found.gathers] == order[::-1]
    assert all(each.action.verb is Verb.GRADIENT for each in found.reductions)


# ---------------------------------------------------------------- the network
NETWORK = Network(8, 400e9, 320e9, 8e-6, 3e-6, 14e-6, 1e-6)
FAST = Network(8, 400e9, 320e9, 0.0, 0.0, 0.0, 0.0)


def seconds(network: Network, call: Call, among: Among, sharding: Sharding, nbytes: int) -> float:
    from offload.planning.step.collective_sequence import Exchange

    return network.seconds(Exchange(call, among, nbytes), sharding)


def test_bytes_pass_the_slower_of_two_links() -> None:
    inside, across = Sharding.of(3, None, 8, 0), Sharding.of(3, None, 64, 0)
    nbytes = 8 << 30
    ring = seconds(FAST, Call.ALL_GATHER, Among.SHARDS, inside, nbytes)
    assert ring == pytest.approx(nbytes * 7 / 8 / 400e9)
    ring = seconds(FAST, Call.ALL_GATHER, Among.SHARDS, across, nbytes)
    assert ring == pytest.approx(nbytes * 56 / 64 / 320e9)
    # nothing is summed on the way: each of 8 ranks has an eighth of the network
    sent = seconds(FAST, Call.ALL_TO_ALL, Among.SHARDS, across, nbytes)
    assert sent == pytest.approx(8 * ring)


def test_replicas_are_on_other_machines() -> None:
    hybrid = Sharding.of(3, 8, 64, 0)
    members = NETWORK.members(Among.REPLICAS, hybrid)
    assert (members.ranks, members.per_machine, members.machines) == (8, 1, 8)
    assert NETWORK.members(Among.SHARDS, hybrid).machines == 1
    halves = Sharding.of(3, 4, 64, 0)
    assert NETWORK.members(Among.REPLICAS, halves).per_machine == 2


def test_alone_nothing_takes_time_and_more_ranks_take_longer() -> None:
    alone = seconds(NETWORK, Call.ALL_GATHER, Among.SHARDS, Sharding.of(3, None, 1, 0), 1 << 30)
    assert alone == 0.0
    for call in Call:
        times = [
            seconds(NETWORK, call, Among.SHARDS, Sharding.of(3, None, 1 << power, 0), 1 << 30)
            for power in range(1, 13)
        ]
        assert times == sorted(times)
