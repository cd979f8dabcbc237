"""Trainer, watched: each step's loss and norm are those that Trainer logs."""

from pathlib import Path
from typing import Any

import pytest

from offload.errors import ConfigError
from tests.offload.test_watch import Kept
from tests.outside.trainer_cases import ARGUMENTS, Rows, logged, settings, tiny_llama, transformers

pytestmark = pytest.mark.filterwarnings("ignore")

if transformers is not None:
    from offload.integrations.transformers import OffloadTrainer, WatchCallback

STEPS = 4


def arguments(folder: Path, **changed: Any) -> Any:
    keys = {**ARGUMENTS, "max_steps": STEPS, "eval_steps": 2, "save_steps": 2,
            "gradient_accumulation_steps": 2, **changed}  # fmt: skip
    return transformers.TrainingArguments(str(folder), **keys)


def trainer_of(folder: Path, callback: Any, kind: Any = OffloadTrainer, **changed: Any) -> Any:
    return OffloadTrainer(
        tiny_llama(), arguments(folder, **changed), train_dataset=Rows(16, 1),
        eval_dataset=Rows(4, 2), callbacks=[callback],
        offload=settings(folder, {"optimizer": "host"}, clip_grad_norm=None, optimizer={}),
    )  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", [{}, {"fp16": True}])
def test_rows_are_what_trainer_logs(precision: dict[str, bool], tmp_path: Path, capfd: Any) -> None:
    kept = Kept()
    callback = WatchCallback(loggers=[kept], tokens=100, every=1)
    trainer = trainer_of(tmp_path, callback, disable_tqdm=False, **precision)
    trainer.train()
    expected = logged(trainer)
    assert [step for step, _ in kept.rows] == [1, 2, 3, 4]
    assert kept.of("loss") == pytest.approx(expected["loss"], rel=1e-3 if precision else 1e-6)
    assert kept.of("gradient_norm") == pytest.approx(expected["grad_norm"], rel=1e-6)
    evaluated = [value for value in kept.of("validation_loss") if value is not None]
    assert evaluated == pytest.approx(expected["eval_loss"])
    assert kept.closed == 1
    said = capfd.readouterr().err
    assert "step 4/4 | loss " in said
    assert "/4 [" not in said, "Trainer's bar is not there"
    trainer.engine.close()


def test_a_trainer_without_an_engine_is_refused(tmp_path: Path) -> None:
    trainer = transformers.Trainer(
        tiny_llama(), arguments(tmp_path, eval_strategy="no", save_strategy="no"),
        train_dataset=Rows(16, 1), callbacks=[WatchCallback()],
    )  # fmt: skip
    with pytest.raises(ConfigError, match="optimizer is a AdamW, and only an engine"):
        trainer.train()
