"""transformers' Trainer and accelerate's loop train through an engine as without one.

Losses, logged gradient norms and weights equal those of torch's AdamW to its rounding, and a run
that is resumed with a new engine equals the one that was not interrupted, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import offload
from offload.errors import UnsupportedError
from tests.offload.engine_cases import assert_same_bits
from tests.outside.trainer_cases import (
    ACCUMULATE,
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


def test_trainer_logs_norms_under_updates_in_backward(tmp_path: Path) -> None:
    """Trainer clips to infinity to know the norm."""
    keys = {"max_grad_norm": 0.0, "max_steps": 3, "eval_strategy": "no", "save_strategy": "no"}
    model, other = tiny_llama(), tiny_llama()
    plain = logged(train(tmp_path / "plain", model, plain_optimizer(model), **keys))
    optimizer = {"type": "adamw", "lr": 3e-3, "weight_decay": 0.1, "in_backward": True}
    accumulation = {"gradient_accumulation_steps": ACCUMULATE}
    with offload.initialize(
        other, settings(tmp_path, PLACEMENTS["nvme"], optimizer=optimizer, **accumulation)
    ) as engine:
        assert_close(logged(train(tmp_path / "ours", other, engine.optimizer, **keys)), plain)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_trainer_with_an_optimizer_of_its_own_is_refused(placement: str, tmp_path: Path) -> None:
    model = tiny_llama()
    keys = settings(tmp_path, PLACEMENTS[placement])
    refusal = pytest.raises(UnsupportedError, match=r"optimizers=\(engine.optimizer, None\)")
    with offload.initialize(model, keys), refusal:
        train(tmp_path / "run", model)


def accelerated(model: Any, optimizer: Any) -> tuple[list[float], list[float]]:
    """The loop that accelerate's own documentation shows: losses and gradient norms."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
    loader = DataLoader(Rows(2 * ACCUMULATE * 5, seed=1), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_accelerate_loop_trains_as_without_an_engine(placement: str, tmp_path: Path) -> None:
    expected_model, model = tiny_llama(), tiny_llama()
    expected = accelerated(expected_model, plain_optimizer(expected_model))
    with offload.initialize(model, settings(tmp_path, PLACEMENTS[placement])) as engine:
        found = accelerated(model, engine.optimizer)
        assert len(found[1]) == 5
        assert_close(found, expected)
        assert_close(values_of(model), values_of(expected_model))
