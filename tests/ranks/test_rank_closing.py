"""What closing gives back on several ranks: whole parameters on each, as in one process."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

import offload
from offload.engine_lookup import engine_for
from offload.errors import RankError, StateError
from tests.offload.engine_cases import (
    HOST,
    NVME,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    losses_of,
    parameters_of,
    seeded,
)
from tests.ranks.processes import run_ranks
from tests.ranks.programs import OPTIMIZER
from tests.ranks.test_rank_ways import keys_of

Values = dict[str, Tensor]


def values_of(model: nn.Module) -> Values:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def lives(folder: str, stage: int, keep: str, more: dict[str, Any]) -> list[Values]:
    """Of a model that trains, is closed amid an accumulation, computes, and trains again."""
    model, values = seeded(TinyLM), []
    for _ in range(2):
        engine = offload.initialize(model, keys_of(folder, stage, **more))
        losses_of(engine, batches(2))
        engine.backward(model.loss(batches(3)[2]))
        values.append(parameters_of(engine))
        engine.close(keep)  # type: ignore[arg-type]
        assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
        values.append(values_of(model))
        model.loss(batches(1)[0]).backward()  # an ordinary model
        model.zero_grad()
    return values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "keep", "more"),
    [
        (3, "host", {"placement": NVME}),
        (3, "file", {"precision": "bf16"}),
        (2, "file", {}),
        (1, "host", {}),
    ],
)
def test_each_rank_gets_whole_parameters(
    stage: int, keep: str, more: dict[str, Any], tmp_path: Path, long: bool
) -> None:
    if not long and (stage, keep) != (3, "host"):
        pytest.skip("a sample")
    ranks = run_ranks(2, tmp_path / "run", lives, str(tmp_path), stage, keep, more, timeout_s=60)
    alone, keys = seeded(TinyLM), {"optimizer": OPTIMIZER, **more, "placement": HOST}
    for lived in range(2):
        with offload.initialize(alone, config(tmp_path, **keys)) as one:
            losses_of(one, batches(2))
            expected = parameters_of(one)
            one.optimizer.zero_grad()
        for rank in ranks:
            inside, given = rank[2 * lived : 2 * lived + 2]
            assert_same_bits(inside, expected)
            assert_same_bits(given, values_of(alone))


def parting(folder: str, keeps: list[Any]) -> tuple[str, float, Values]:
    """What closing raises where ranks do not ask for the same; then the model as it is."""
    model = seeded(TinyLM)
    engine = offload.initialize(model, keys_of(folder, 1))
    began, raised = time.monotonic(), ""
    try:
        engine.close(keeps[dist.get_rank()])
    except RankError as error:
        raised = str(error)
    took = time.monotonic() - began
    engine.close()
    try:
        return raised, took, values_of(model)
    except StateError:
        return raised, took, {}


def test_a_rank_that_asks_alone_is_told_so_at_once(tmp_path: Path) -> None:
    asking, other = run_ranks(2, tmp_path / "run", parting, str(tmp_path), ["host", None])
    assert "rank 1 has closed its engine" in asking[0]
    assert asking[1] < 8  # not all of zero.timeout_s
    assert (other[0], asking[2], other[2]) == ("", {}, {})


def taking_over(folder: str) -> list[Values]:
    model, values = seeded(TinyLM), []
    loaded = offload.OffloadConfig.load(keys_of(folder, 3, placement=NVME))
    for changed in ({}, {}, {"seed": 5}):
        engine = engine_for(model, loaded.model_copy(update=changed))
        losses_of(engine, batches(2))
        values.append(parameters_of(engine))
    engine.close("drop")
    return values


def test_ranks_take_a_model_over_together(tmp_path: Path) -> None:
    ranks = run_ranks(2, tmp_path / "run", taking_over, str(tmp_path), timeout_s=60)
    alone = seeded(TinyLM)
    for lived in range(3):
        with offload.initialize(alone, config(tmp_path, HOST, optimizer=OPTIMIZER)) as one:
            losses_of(one, batches(2))
        for rank in ranks:
            assert_same_bits(rank[lived], values_of(alone))
