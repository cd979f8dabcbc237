"""Stages of a pipeline, each with an engine, train what the whole model trains."""

from pathlib import Path

import pytest

from tests.offload.engine_cases import HOST, NVME, assert_same_bits
from tests.ranks import pipelines
from tests.ranks.parallel_models import Case
from tests.ranks.pipelines import Pipeline
from tests.ranks.processes import RanksFailed, run_ranks
from tests.ranks.programs import assert_near

NO_CLIP = {"clip_grad_norm": None}
PIPELINES = [
    Pipeline(schedule, Case(1, homes, keys=NO_CLIP), scaled)
    for schedule, homes, scaled in (
        ("ScheduleGPipe", NVME, False), ("Schedule1F1B", HOST, True),
        ("Schedule1F1B", NVME, True), ("ScheduleInterleaved1F1B", NVME, False),
        ("ScheduleInterleavedZeroBubble", NVME, False),
    )
]  # fmt: skip


def test_a_pipeline_trains_as_one_rank_with_as_many_passes(tmp_path: Path) -> None:
    by_rank = run_ranks(2, tmp_path / "2", pipelines.run_all, PIPELINES, 1, str(tmp_path))
    expected = pipelines.alone(PIPELINES[0].case, str(tmp_path))
    for first, last in zip(*by_rank, strict=True):
        assert last.losses == expected.losses
        assert_same_bits({**first.weights, **last.weights}, expected.weights)


@pytest.mark.slow
def test_stages_with_replicas_shard_their_states(tmp_path: Path) -> None:
    cases = [Pipeline("Schedule1F1B", Case(stage, NVME, keys=NO_CLIP)) for stage in (1, 3)]
    by_rank = run_ranks(4, tmp_path / "4", pipelines.run_all, cases, 2, str(tmp_path))
    for outcomes in by_rank:
        assert outcomes[1].losses == outcomes[0].losses
        assert_same_bits(outcomes[1].weights, outcomes[0].weights)
    expected = pipelines.alone(cases[0].case, str(tmp_path))
    weights = {**by_rank[0][0].weights, **by_rank[2][0].weights}
    assert weights.keys() == expected.weights.keys()
    for name, value in weights.items():
        assert_near(value, expected.weights[name], what=name)


def test_a_schedule_that_would_train_something_else_is_refused(tmp_path: Path) -> None:
    case = Pipeline("ScheduleGPipe", Case(1, HOST, steps=1, keys={"clip_grad_norm": 1.0}))
    with pytest.raises(RanksFailed, match="clip_grad_norm in a stage of a pipeline"):
        run_ranks(2, tmp_path, pipelines.run, case, 1, str(tmp_path))
