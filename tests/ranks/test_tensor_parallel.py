"""A model parallelised by DTensor trains as one that is not: stages and placements agree to the
last bit, with the unparallelised model to rounding. Dispatched, it computes what it does on one
rank; whole ones share nothing."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.offload.engine_cases import HOST, NVME, TinyLM, assert_same_bits, batches, bits, seeded
from tests.ranks import parallel_models
from tests.ranks.parallel_models import Case, Outcome
from tests.ranks.processes import run_ranks
from tests.ranks.programs import assert_near

PARKED: dict[str, Any] = {**NVME, "activations": {"tier": "nvme", "checkpoint": True}}
BF16 = {"precision": "bf16"}
# Cases that only differ in stage and placement must not differ in a bit.
FAMILIES: dict[str, list[Case]] = {
    "fp32": [
        *(Case(stage, homes) for homes in (HOST, NVME) for stage in (1, 2, 3)),
        Case(3, PARKED),
    ],
    "bf16": [Case(1, HOST, keys=BF16), Case(3, NVME, keys=BF16)],
}
OF_SHAPE = {
    (2, 2): {"fp32": FAMILIES["fp32"]},
    (1, 2): {**FAMILIES, "fp32": [Case(1, HOST), Case(1, NVME)]},  # stages are alike then
}
Run = tuple[tuple[int, int], dict[str, list[list[Outcome]]]]


@pytest.fixture(scope="module", params=OF_SHAPE, ids=str)
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, long: bool
) -> Run:
    """The mesh, and every rank's outcomes of every family."""
    shape, folder = request.param, tmp_path_factory.mktemp("mesh")
    families = OF_SHAPE[shape]
    if shape == (2, 2) and not long:
        some = [(1, HOST), (3, PARKED)]
        families = {"fp32": [Case(*each) for each in some]}
    cases = [case for family in families.values() for case in family]
    by_rank = run_ranks(
        shape[0] * shape[1], folder, parallel_models.train_all, cases, shape, str(folder)
    )  # fmt: skip
    outcomes_of = {}
    for name, family in families.items():
        outcomes_of[name] = [outcomes[: len(family)] for outcomes in by_rank]
        by_rank = [outcomes[len(family) :] for outcomes in by_rank]
    return shape, outcomes_of


@pytest.mark.parametrize("family", FAMILIES)
def test_no_stage_and_no_placement_changes_a_bit(run: Run, family: str) -> None:
    if family not in run[1]:
        pytest.skip("on the smaller mesh")
    by_rank = run[1][family]
    norms, weights = by_rank[0][0].norms, by_rank[0][0].weights
    for outcomes in by_rank:
        for outcome in outcomes:
            assert outcome.losses == outcomes[0].losses
            assert outcome.norms == norms
            assert_same_bits(outcome.weights, weights)
            assert_same_bits(outcome.states, by_rank[0][0].states)


def test_it_trains_as_the_model_that_is_not_parallel(run: Run, tmp_path: Path) -> None:
    (ranks, ways), by_rank = run[0], run[1]["fp32"]
    expected = parallel_models.alone(Case(1, HOST), ranks, str(tmp_path))
    losses = [by_rank[rank * ways][0].losses for rank in range(ranks)]
    actual = [loss for step in zip(*losses, strict=True) for loss in step]
    assert actual == pytest.approx(expected.losses, rel=1e-6)
    first = by_rank[0][0]
    assert first.norms == pytest.approx(expected.norms, rel=1e-6)
    assert min(first.norms) > parallel_models.CLIP
    for name, value in first.weights.items():
        assert_near(value, expected.weights[name], what=name)
    assert first.states.keys() == expected.states.keys()


@pytest.mark.slow
def test_a_vocabulary_in_uneven_parts_trains_as_a_whole_one(tmp_path: Path) -> None:
    by_rank = run_ranks(2, tmp_path / "2", parallel_models.train_language, True, str(tmp_path))
    losses, expected = parallel_models.train_language(False, str(tmp_path))
    for actual_losses, actual in by_rank:
        assert actual_losses == pytest.approx(losses, rel=1e-6)
        assert actual.keys() == expected.keys()
        assert torch.equal(actual["twice"], 2 * actual["head.weight"])
        for name, value in actual.items():
            if expected[name].norm() >= 1e-3:
                assert_near(value, expected[name], 1e-5 if name.endswith("gradient") else 1e-6)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """By rank: a step that overflows, a run in two parts, and refusals."""
    folder = tmp_path_factory.mktemp("small")
    return run_ranks(2, folder, parallel_models.in_turn, str(folder))


@pytest.mark.slow
def test_all_ranks_skip_a_step_in_which_one_overflows(small: list[tuple[Any, ...]]) -> None:
    first, second = (overflow for overflow, _, _ in small)
    assert first[0] == second[0] == 1
    assert first[1] == second[1] == [math.inf]
    assert_same_bits(first[2], second[2])
    assert all(value.isfinite().all() for value in first[2].values())


def test_a_rank_that_steps_alone_is_told(tmp_path: Path) -> None:
    told, _ = run_ranks(2, tmp_path, parallel_models.left_alone, str(tmp_path))
    assert re.match(r"RankError: rank 0: .* among ranks 0, 1 failed .*: rank 1 has", told)


@pytest.mark.slow
def test_a_run_goes_on_from_a_distributed_checkpoint(small: list[tuple[Any, ...]]) -> None:
    for _, (through, resumed), _ in small:
        assert resumed.losses == through.losses
        assert_same_bits(resumed.weights, through.weights)
        assert_same_bits(resumed.states, through.states)


def test_what_cannot_work_is_refused(small: list[tuple[Any, ...]]) -> None:
    for _, _, messages in small:
        expected = {
            "no mesh": 'ConfigError.*mesh=mesh\\["dp"\\]',
            "two dimensions": "ConfigError.*not one dimension of ranks",
            "on two": "UnsupportedError.*last.weight is a DTensor on a mesh of 2 dimensions",
            "meta": "UnsupportedError.*on the meta device",
            "weights": "UnsupportedError.*weights=",
            "save": "UnsupportedError: save_checkpoint.*torch.distributed.checkpoint",
            "load": "UnsupportedError: load_checkpoint",
        }
        assert messages.keys() == expected.keys()
        for what, pattern in expected.items():
            assert re.match(pattern, messages[what]), messages[what]


# ------------------------------------------------------------------------- dispatched models
@pytest.fixture(scope="module")
def dispatched(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(2, folder, parallel_models.dispatched_all, str(folder))


def test_parts_compute_what_the_whole_does(dispatched: list[Any], tmp_path: Path) -> None:
    (expected,) = parallel_models.outputs(str(tmp_path))
    for outputs, _, _ in dispatched:
        for output in outputs:
            assert torch.equal(output, outputs[0])
            assert (output - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.slow
def test_a_model_with_a_plan_generates_as_on_one_rank(
    dispatched: list[Any], tmp_path: Path
) -> None:
    tokens, logits = parallel_models.generated(str(tmp_path))
    for _, (others, parts), _ in dispatched:
        assert others == tokens
        assert (parts - logits).norm() <= 1e-6 * logits.norm()


def test_ranks_with_models_of_their_own_share_nothing(dispatched: list[Any]) -> None:
    for rank, (_, _, outputs) in enumerate(dispatched):
        with torch.no_grad():
            expected = bits(seeded(TinyLM, rank)(batches(1)[0][:, :-1]))
        assert outputs == [expected] * (1 + 2 * rank)
