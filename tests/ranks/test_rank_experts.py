"""Experts that are spread over ranks train as experts that every rank has."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload.checkpoint.format.reader import CheckpointReader
from tests.offload.engine_cases import HOST, NVME, assert_same_bits, states_of
from tests.ranks.expert_programs import (
    EXPERTS,
    BranchingLM,
    case,
    keys_of,
    refusals,
    refusals_of_four,
    save_and_load,
    spread,
    use_gradients_and_values,
)
from tests.ranks.processes import run_ranks
from tests.ranks.programs import OPTIMIZER, Outcome, train_all


def together(states: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Those of all ranks; what several have is the same."""
    merged: dict[str, Tensor] = {}
    for mine in states:
        for name, value in mine.items():
            assert torch.equal(merged.setdefault(name, value), value), name
    return merged


def assert_close(actual: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    mine, theirs = (together(each.states for each in some) for some in (actual, expected))
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        # AdamW makes more of the last bits of a gradient near zero; the learning rate is 3e-3
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-5, msg=name)
    for here, there in zip(actual, expected, strict=True):
        torch.testing.assert_close(here.losses, there.losses, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(here.norms, there.norms, rtol=1e-6, atol=1e-6)
        assert here.norms == actual[0].norms


WAYS: dict[str, dict[str, Any]] = {
    "branches": {"stage": 2, "kind": BranchingLM},
    "passes": {"stage": 2, "passes": 2, "local": True},
    "in backward": {
        "stage": 1, "placement": HOST,
        "keys": {"optimizer": {**OPTIMIZER, "in_backward": True}, "clip_grad_norm": None},
    },
    "recomputed": {"stage": 3, "placement": {**HOST, "activations": {"checkpoint": True}}},
    "as with a GPU": {"stage": 3, "placement": NVME, "mirrored": True},
    "replicas": {"stage": 2, "keys": {"zero": {"stage": 2, "shard_group": 1}}},
    "two passes": {"stage": 3, "passes": 2},
}  # fmt: skip
FEW = 2  # of the ways, unless --long


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_stage_trains_as_with_all_experts_on_each_rank(
    world_size: int, tmp_path: Path, long: bool
) -> None:
    """Of four ranks, two have the same experts, and share their gradients and states."""
    stages = range(4) if long else (0, 3)
    cases = [case(1, 2, steps=2), *(case(2, stage, steps=2) for stage in stages)]
    ranks = run_ranks(world_size, tmp_path, train_all, cases, str(tmp_path))
    one, *spread = (list(each) for each in zip(*ranks, strict=True))
    assert max(one[0].norms) > 0.5  # what the cases clip to
    for outcomes in spread:
        assert_close(outcomes, one)
        for here, first in zip(outcomes, spread[0], strict=True):
            assert_same_bits(here.states, first.states)
    own = {n for n in spread[0][-1].states if ".experts." in n}
    assert {int(n.split(".experts.")[1][0]) for n in own} == {*range(EXPERTS // 2, EXPERTS)}


@pytest.mark.slow
def test_whatever_else_a_step_does_experts_are_as_on_each_rank(tmp_path: Path, long: bool) -> None:
    some = [*WAYS.values()] if long else [*WAYS.values()][:FEW]
    cases = [case(ep_size, steps=2, **way) for way in some for ep_size in (1, 2)]
    ranks = run_ranks(2, tmp_path, train_all, cases, str(tmp_path))
    for number in range(0, len(cases), 2):
        one, two = ([rank[number + ep] for rank in ranks] for ep in (0, 1))
        assert_close(two, one)


@pytest.mark.slow
def test_a_checkpoint_has_the_experts_of_all_ranks(tmp_path: Path, long: bool) -> None:
    ways = [(1, 1), (1, 2), (2, 1), (2, 2)] if long else [(1, 2), (2, 1)]
    ranks = run_ranks(2, tmp_path, save_and_load, str(tmp_path), ways)
    states = {
        name: [together(rank[name][when] for rank in ranks) for when in (0, 1)] for name in ranks[0]
    }
    for saved, loaded in ways:
        assert_same_bits(states[f"{saved} {loaded}"][0], states[f"{saved}"][0])
        if saved == loaded:
            assert_same_bits(states[f"{saved} {loaded}"][1], states[f"{saved}"][1])
    assert any(".experts.3." in name for name in states["2"][0])
    with offload.initialize(spread(1)(), keys_of(str(tmp_path), 0, precision="bf16")) as engine:
        engine.load_checkpoint(tmp_path / "of 2")
        assert_same_bits(states_of(engine), states["2"][0])
    with CheckpointReader(tmp_path / "of 2") as reader:
        names = {name for names, _ in reader.weights() for name in names}
    assert names == spread(1)().state_dict().keys()


def test_gradients_and_values_of_experts_are_their_ranks_own(tmp_path: Path) -> None:
    ranks = run_ranks(2, tmp_path, use_gradients_and_values, str(tmp_path))
    written = "blocks.1.moe.experts.2.0.weight"
    assert [changed for changed, _, _ in ranks] == [[], [written, f"{written} master"]]
    for _, ratios, names in ranks:
        assert ratios == pytest.approx([2.0] * len(ratios), rel=1e-2)
        assert names


@pytest.mark.slow
def test_what_does_not_go_with_experts_of_other_ranks_is_said(tmp_path: Path) -> None:
    for rank, messages in enumerate(run_ranks(2, tmp_path, refusals, str(tmp_path))):
        says = iter(messages)
        assert "0.weight is tied" in next(says)
        assert f"experts.{2 * rank}.norm.running_mean is a buffer of an expert" in next(says)
        assert "ep_size has to be the same on all ranks" in next(says)
        assert "ep_size 2 with mesh=" in next(says)
        assert "give offload.initialize the model around" in next(says)
        assert ".grad was set to a tensor" in next(says)
        assert "the ranks went different ways" in next(says)


def test_layers_that_are_spread_in_two_ways_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(4, tmp_path, refusals_of_four, str(tmp_path)):
        assert "has ep_size 4, another layer 2" in message
