"""Dispatched models on two ranks: in parts by DTensor they compute what they compute on one, and
whole ones share nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.offload.engine_cases import TinyLM, batches, bits, seeded
from tests.ranks import parallel_inference
from tests.ranks.processes import run_ranks


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(2, folder, parallel_inference.all_of_it, str(folder))


def test_parts_compute_what_the_whole_does(by_rank: list[Any], tmp_path: Path) -> None:
    (expected,) = parallel_inference.outputs(str(tmp_path))
    for outputs, _, _ in by_rank:
        for output in outputs:
            assert torch.equal(output, outputs[0])
            assert (output - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.slow
def test_a_model_with_a_plan_generates_as_on_one_rank(by_rank: list[Any], tmp_path: Path) -> None:
    tokens, logits = parallel_inference.generated(str(tmp_path))
    for _, (others, parts), _ in by_rank:
        assert others == tokens
        assert (parts - logits).norm() <= 1e-6 * logits.norm()


def test_ranks_with_models_of_their_own_share_nothing(by_rank: list[Any]) -> None:
    for rank, (_, _, outputs) in enumerate(by_rank):
        with torch.no_grad():
            expected = bits(seeded(TinyLM, rank)(batches(1)[0][:, :-1]))
        assert outputs == [expected] * (1 + 2 * rank)
