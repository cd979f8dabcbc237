"""Gradients that are rounded before they travel between ranks: fewer bytes, and approximate."""

from __future__ import annotations

from typing import Any

import pytest

from tests.offload.engine_cases import HOST, TinyLM, assert_same_bits
from tests.ranks.processes import run_ranks
from tests.ranks.programs import Case, Outcome, train_all


def case(stage: int, homes: dict[str, Any] = HOST, **zero: Any) -> Case:
    keys: dict[str, Any] = {"zero": {"stage": stage, **zero}}
    return Case(stage, homes, TinyLM, keys=keys)


EXACT = [case(3)]
ROUNDED = [case(stage, reduce_dtype="bf16") for stage in (0, 1, 2, 3)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[list[Outcome]]:
    folder = tmp_path_factory.mktemp("wire")
    cases = [*EXACT, *ROUNDED]
    return run_ranks(2, folder, train_all, cases, str(folder))


@pytest.mark.slow
def test_rounding_is_the_same_on_all_ranks_and_at_all_stages(outcomes: list[list[Outcome]]) -> None:
    first = outcomes[0][1]
    for per_rank in outcomes:
        for outcome in per_rank[1:]:
            assert_same_bits(outcome.states, first.states)


def test_it_is_approximate_and_takes_half_the_bytes(outcomes: list[list[Outcome]]) -> None:
    exact, *rounded = outcomes[0]
    for outcome in rounded:
        assert outcome.losses[0] == exact.losses[0]
        assert outcome.losses != exact.losses
        assert outcome.losses == pytest.approx(exact.losses, rel=0.05)
    assert rounded[3].moved["reduce-scatter"] * 2 == exact.moved["reduce-scatter"]
