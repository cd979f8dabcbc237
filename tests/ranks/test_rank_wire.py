"""Formats in which things travel between ranks: fewer bytes, said to be approximate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offload.config import OffloadConfig
from offload.errors import ConfigError
from tests.offload.engine_cases import HOST, NVME, TinyLM, assert_same_bits, config
from tests.ranks.processes import run_ranks
from tests.ranks.programs import Case, Outcome, train_all


def case(stage: int, homes: dict[str, Any] = HOST, **zero: Any) -> Case:
    keys: dict[str, Any] = {"zero": {"stage": stage, **zero}}
    return Case(stage, homes, TinyLM, keys=keys)


EXACT = [case(3)]
ROUNDED = [case(stage, reduce_dtype="bf16") for stage in (0, 1, 2, 3)]
CODED = [case(stage, quantized_gradients=True) for stage in (1, 2, 3)]
WEIGHTS = [
    case(3, homes, quantized_weights=True, quantized_gradients=True) for homes in (HOST, NVME)
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[list[Outcome]]:
    folder = tmp_path_factory.mktemp("wire")
    cases = [*EXACT, *ROUNDED, *CODED, *WEIGHTS]
    return run_ranks(2, folder, train_all, cases, str(folder))


def test_every_format_is_the_same_on_all_ranks_and_at_all_stages(
    outcomes: list[list[Outcome]],
) -> None:
    first = outcomes[0]
    for per_rank in outcomes:
        for family in (range(1, 5), range(5, 8), range(8, 10)):
            for number in family:
                assert_same_bits(per_rank[number].states, first[family[0]].states)


def test_they_are_approximate_and_take_fewer_bytes(outcomes: list[list[Outcome]]) -> None:
    exact, *others = outcomes[0]
    for number, found in enumerate(others):
        assert found.losses[0] == exact.losses[0] or number >= 7  # weights in 8 bits
        assert found.losses != exact.losses
        assert found.losses == pytest.approx(exact.losses, rel=0.05)
    rounded, coded, weights = others[3], others[6], others[7]
    assert rounded.moved["reduce-scatter"] * 2 == exact.moved["reduce-scatter"]
    eighth = (1 + 4 / 256) / 4
    assert coded.moved["reduce-scatter"] == exact.moved["reduce-scatter"] * eighth
    assert weights.moved["all-gather"] == exact.moved["all-gather"] * eighth


def test_weights_in_8_bits_need_stage_3(tmp_path: Path) -> None:
    keys = config(tmp_path, HOST, zero={"stage": 2, "quantized_weights": True})
    with pytest.raises(ConfigError, match=r"quantized_weights: true contradicts stage: 2"):
        OffloadConfig.load(keys)
