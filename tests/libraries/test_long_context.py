"""What Trainer's users turn on for long sequences, and what takes its place in an engine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from offload.errors import UnsupportedError
from tests.libraries.rows import PLACEMENTS, Result, row
from tests.outside.trainer_cases import (
    ARGUMENTS,
    Rows,
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
def test_chunked_loss(place: str, folder: Path) -> Result:
    kind, own = transformers.Trainer, {}
    if place != "plain":
        kind = trainers.OffloadTrainer
        own["offload"] = settings(folder, PLACEMENTS[place], loss={"chunked": True})
    # by its epsilon AdamW enlarges less rounding
    trainer = made(kind, folder, weight_decay=0.1, adam_epsilon=1e-6, **own)
    trainer.train()
    means = [entry["eval_mean"] for entry in trainer.state.log_history if "eval_mean" in entry]
    return logged(trainer), means, values_of(trainer.model)


@row(
    "transformers", "OffloadTrainer, `gradient_checkpointing_kwargs={'offload': True}`", "Llama",
    refused="UnsupportedError: leave offload=True out, and set placement.activations: "
    "{checkpoint: true, tier: host} in the offload configuration (tier: nvme without a GPU)",
)  # fmt: skip
def test_checkpoints_on_the_cpu(place: str, folder: Path) -> None:
    keys = {"offload": settings(folder, PLACEMENTS[place])}
    asked = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}
    with pytest.raises(UnsupportedError, match=r"placement\.activations: {checkpoint: true"):
        made(trainers.OffloadTrainer, folder, **asked, **keys)
    model = tiny_llama()
    model.gradient_checkpointing_enable(offload=True)
    made(trainers.OffloadTrainer, folder, model, **keys).train()
