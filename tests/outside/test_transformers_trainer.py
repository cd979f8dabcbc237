"""transformers' own Trainer, given `engine.optimizer`, trains as without an engine.

Losses, logged gradient norms and weights equal those of torch's AdamW to its rounding, and a run
that is resumed with a new engine equals the one that was not interrupted, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import offload
from offload.errors import UnsupportedError
from tests.offload.engine_cases import assert_same_bits
from tests.outside.trainer_cases import (
    ARGUMENTS,
    CLIP,
    PLACEMENTS,
    STEPS,
    Rows,
    assert_close,
    logged,
    plain_optimizer,
    quiet,
    settings,
    tiny_llama,
    transformers,
    values_of,
)

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def train(
    folder: Path,
    model: nn.Module,
    optimizer: Any = None,
    *,
    resume: Path | None = None,
    **keys: Any,
) -> Any:
    arguments = transformers.TrainingArguments(output_dir=str(folder), **{**ARGUMENTS, **keys})
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Rows(120, seed=1), eval_dataset=Rows(8, seed=2),
        optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    model = tiny_llama()
    with quiet():
        trainer = train(tmp_path_factory.mktemp("plain"), model, plain_optimizer(model))
    return logged(trainer), values_of(model)


@pytest.mark.sample("nvme")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_trainer_logs_what_it_logs_without_an_engine_and_resumes(
    placement: str, plain: tuple[Any, Any], tmp_path: Path
) -> None:
    keys = settings(tmp_path, PLACEMENTS[placement])
    model = tiny_llama()
    with offload.initialize(model, keys) as engine:
        whole = logged(train(tmp_path / "whole", model, engine.optimizer))
        weights = values_of(model)
    assert len(whole["loss"]) == STEPS
    assert min(whole["grad_norm"]) > CLIP
    assert_close(whole, plain[0])
    assert_close(weights, plain[1])
    again = tiny_llama()
    with offload.initialize(again, keys) as engine:
        saved = tmp_path / "whole" / "checkpoint-8"
        assert logged(train(tmp_path / "again", again, engine.optimizer, resume=saved)) == whole
        assert_same_bits(values_of(again), weights)


def test_trainer_with_an_optimizer_of_its_own_is_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    keys = settings(tmp_path, PLACEMENTS["nvme"])
    refusal = pytest.raises(UnsupportedError, match=r"optimizers=\(engine.optimizer, None\)")
    with offload.initialize(model, keys), refusal:
        train(tmp_path / "run", model)
