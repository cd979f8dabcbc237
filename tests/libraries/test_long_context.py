"""What Trainer's users turn on for long sequences, and what takes its place in an engine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.errors import UnsupportedError
from tests.libraries.rows import PLACEMENTS, row
from tests.offload.engine_cases import HOST, assert_same_bits
from tests.outside.trainer_cases import (
    ARGUMENTS,
    Rows,
    assert_close,
    logged,
    settings,
    tiny_llama,
    transformers,
    values_of,
)

trainers = importlib.import_module("offload.integrations.transformers")
SHORT: dict[str, Any] = {**ARGUMENTS, "max_steps": 4, "eval_steps": 2, "save_strategy": "no"}


def made(kind: Any, folder: Path, model: Any = None, **keys: Any) -> Any:
    own = {"offload": keys.pop("offload")} if "offload" in keys else {}
    return kind(
        model or tiny_llama(), transformers.TrainingArguments(str(folder), **{**SHORT, **keys}),
        train_dataset=Rows(40, seed=1), eval_dataset=Rows(6, seed=2),
        compute_metrics=lambda seen: {"mean": float(seen.predictions.mean())}, **own,
    )  # fmt: skip


@row("transformers", "OffloadTrainer, `loss: {chunked: true}`", "Llama")
def test_chunked_loss(placement: str, tmp_path: Path) -> None:
    def trained(kind: Any, **keys: Any) -> Any:  # by its epsilon AdamW enlarges less rounding
        trainer = made(kind, tmp_path, weight_decay=0.1, adam_epsilon=1e-6, **keys)
        trainer.train()
        means = [entry["eval_mean"] for entry in trainer.state.log_history if "eval_mean" in entry]
        return {**logged(trainer), "eval_mean": means}, values_of(trainer.model)

    chunked = {"loss": {"chunked": True}}
    runs = [
        trained(trainers.OffloadTrainer, offload=settings(tmp_path, homes, **chunked))
        for homes in (PLACEMENTS[placement], HOST)
    ]
    assert runs[0][0] == runs[1][0]
    assert_same_bits(runs[0][1], runs[1][1])
    assert_close(runs[0], trained(transformers.Trainer))


@row(
    "transformers",
    "OffloadTrainer, `gradient_checkpointing_kwargs={'offload': True}`",
    "Llama",
    refused="UnsupportedError: set `placement.activations: {checkpoint: true, tier: host}`",
)
def test_checkpoints_on_the_cpu(placement: str, tmp_path: Path) -> None:
    match = r"placement\.activations: {checkpoint: true, tier: host}"
    keys = {"offload": settings(tmp_path, PLACEMENTS[placement])}
    asked = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}
    with pytest.raises(UnsupportedError, match=match):
        made(trainers.OffloadTrainer, tmp_path, **asked, **keys)
    model = tiny_llama()
    model.gradient_checkpointing_enable(offload=True)
    with pytest.raises(UnsupportedError, match=match):
        made(trainers.OffloadTrainer, tmp_path, model, **keys).train()
    with pytest.raises(UnsupportedError, match=match):
        offload.initialize(model, keys["offload"])
    model.gradient_checkpointing_enable(every_n_layers=2)
    made(trainers.OffloadTrainer, tmp_path, model, **keys).train()
