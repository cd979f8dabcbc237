"""TRL's SFTTrainer and DPOTrainer train through an engine as without one, and resume to the bit.

TRL needs `datasets`, which is large: it is not among what `make test` installs, and this file is
run by hand (CONTRIBUTING.md). Last run with trl 1.16.0, datasets 5.2.0, accelerate 1.15.0,
transformers 5.17.0 and torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.offload.engine_cases import assert_same_bits
from tests.outside.trainer_cases import (
    ARGUMENTS,
    CLIP,
    PLACEMENTS,
    STEPS,
    assert_close,
    logged,
    plain_optimizer,
    quiet,
    settings,
    tiny_llama,
    transformers,
    values_of,
)

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

WORDS = 61  # and three special tokens
KEYS = {**ARGUMENTS, "max_length": 32, "bf16": False}
Train = Callable[..., Any]  # (folder, model, optimizer, resume=) -> the trainer


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def tokenizer() -> Any:
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    words = [f"w{number}" for number in range(WORDS)] + list(special.values())
    vocabulary = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def sentences(count: int, least: int, most: int, generator: torch.Generator) -> list[str]:
    """Of random words."""

    def sentence() -> str:
        length = int(torch.randint(least, most, (), generator=generator))
        words = torch.randint(WORDS, (length,), generator=generator).tolist()
        return " ".join(f"w{word}" for word in words)

    return [sentence() for _ in range(count)]


def texts(count: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return datasets.Dataset.from_dict({"text": sentences(count, 6, 14, generator)})


def preferences(count: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    columns = ("prompt", "chosen", "rejected")
    rows = {column: sentences(count, 4, 8, generator) for column in columns}
    return datasets.Dataset.from_dict(rows)


def fine_tuned(folder: Path, model: Any, optimizer: Any, resume: Path | None = None) -> Any:
    trainer = trl.SFTTrainer(
        model=model, args=trl.SFTConfig(output_dir=str(folder), **KEYS),
        train_dataset=texts(120, 1), eval_dataset=texts(8, 2), processing_class=tokenizer(),
        optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def preferring(folder: Path, model: Any, optimizer: Any, resume: Path | None = None) -> Any:
    trainer = trl.DPOTrainer(
        model=model, ref_model=tiny_llama(), args=trl.DPOConfig(output_dir=str(folder), **KEYS),
        train_dataset=preferences(120, 1), eval_dataset=preferences(8, 2),
        processing_class=tokenizer(), optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


@pytest.mark.parametrize("train", [fine_tuned, preferring])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_trl_logs_what_it_logs_without_an_engine_and_resumes(
    train: Train, placement: str, tmp_path: Path
) -> None:
    expected_model = tiny_llama()
    expected = logged(train(tmp_path / "plain", expected_model, plain_optimizer(expected_model)))
    keys = settings(tmp_path, PLACEMENTS[placement])
    model = tiny_llama()
    with offload.initialize(model, keys) as engine:
        whole = logged(train(tmp_path / "whole", model, engine.optimizer))
        weights = values_of(model)
    assert len(whole["loss"]) == STEPS
    assert max(whole["grad_norm"]) > CLIP
    assert_close(whole, expected)
    assert_close(weights, values_of(expected_model))
    again = tiny_llama()
    with offload.initialize(again, keys) as engine:
        saved = tmp_path / "whole" / "checkpoint-8"
        assert logged(train(tmp_path / "again", again, engine.optimizer, resume=saved)) == whole
        assert_same_bits(values_of(again), weights)
