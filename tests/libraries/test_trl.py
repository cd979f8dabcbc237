"""TRL's SFTTrainer and DPOTrainer train through an engine as without one, and resume to the bit.

`make test-libraries` installs TRL and runs this file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.offload.engine_cases import assert_same_bits, config
from tests.outside.trainer_cases import (
    ARGUMENTS,
    PLACEMENTS,
    STEPS,
    assert_close,
    logged,
    tiny_llama,
    transformers,
    values_of,
)

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.torch")

WORDS = 61  # and three special tokens
KEYS = {**ARGUMENTS, "max_length": 32, "bf16": False}
Train = Callable[..., Any]  # (folder, model, optimizer, resume=) -> the trainer


def tokenizer() -> Any:
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    words = [f"w{number}" for number in range(WORDS)] + list(special.values())
    vocabulary = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def sentences(count: int, shortest: int, longest: int, generator: torch.Generator) -> list[str]:
    """Of random words."""

    def sentence() -> str:
        length = int(torch.randint(shortest, longest, (), generator=generator))
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


# --------------------------------------------------------------------------- the engine by itself
def mixed(kind: Any) -> Any:
    from offload.integrations.transformers import OffloadMixin

    return type(f"Offload{kind.__name__}", (OffloadMixin, kind), {})


def fine_tuning(kind: Any, folder: Path, **keys: Any) -> Any:
    args = trl.SFTConfig(output_dir=str(folder), **{**KEYS, "weight_decay": 0.1})
    return kind(
        model=tiny_llama(), args=args, train_dataset=texts(120, 1), eval_dataset=texts(8, 2),
        processing_class=tokenizer(), **keys,
    )  # fmt: skip


def preference(kind: Any, folder: Path, **keys: Any) -> Any:
    """Adapters have their reference in the model itself."""
    args = trl.DPOConfig(output_dir=str(folder), **{**KEYS, "weight_decay": 0.1})
    reference = None if "peft_config" in keys else tiny_llama()
    return kind(
        model=tiny_llama(), ref_model=reference, args=args, train_dataset=preferences(120, 1),
        eval_dataset=preferences(8, 2), processing_class=tokenizer(), **keys,
    )  # fmt: skip


@pytest.mark.parametrize("make", [fine_tuning, preference])
def test_with_the_mixin_trl_trains_as_without_and_resumes(make: Train, tmp_path: Path) -> None:
    kind = trl.SFTTrainer if make is fine_tuning else trl.DPOTrainer
    plain = make(kind, tmp_path / "plain")
    plain.train()
    blocks = {"blocks": ["LlamaDecoderLayer"]}
    keys = config(tmp_path, PLACEMENTS["nvme"], groups=blocks)
    trainer = make(mixed(kind), tmp_path / "whole", offload=keys)
    trainer.train()
    whole, weights = logged(trainer), values_of(trainer.model)
    trainer.engine.close()
    assert len(whole["loss"]) == STEPS
    assert_close(whole, logged(plain))
    assert_close(weights, values_of(plain.model))
    again = make(mixed(kind), tmp_path / "again", offload=keys)
    again.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-8"))
    assert logged(again) == whole
    assert_same_bits(values_of(again.model), weights)
    again.engine.close()


@pytest.mark.parametrize("make", [fine_tuning, preference])
def test_with_the_mixin_adapters_train_and_their_files_are_pefts(
    make: Train, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    kind = trl.SFTTrainer if make is fine_tuning else trl.DPOTrainer
    lora = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
    keys = config(tmp_path, PLACEMENTS["nvme"], groups={"blocks": ["LlamaDecoderLayer"]})

    def made(kind: Any, name: str, **more: Any) -> Any:
        return make(kind, tmp_path / name, peft_config=peft.LoraConfig(**lora), **more)

    plain, trainer = made(kind, "plain"), made(mixed(kind), "offload", offload=keys)
    plain.train()
    trainer.train()
    whole = logged(trainer)
    assert_close(whole, logged(plain))
    folders = [tmp_path / name / f"checkpoint-{STEPS}" for name in ("plain", "offload")]
    files = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert files[0] == files[1]
    saved = [safetensors.load_file(f / "adapter_model.safetensors") for f in folders]
    assert saved[0].keys() == saved[1].keys()
    assert_close(saved[1], saved[0])
    weights = values_of(trainer.model)
    trainer.engine.close()
    again = made(mixed(kind), "again", offload=keys)
    again.train(resume_from_checkpoint=str(tmp_path / "offload/checkpoint-8"))
    assert logged(again) == whole
    assert_same_bits(values_of(again.model), weights)
    again.engine.close()


# --------------------------------------------------------------------------- every method
LOADS_MORE = {"GRPOTrainer": {"_load_optimizer_and_scheduler"}}  # called beside the mixin's


@pytest.mark.parametrize("name", ["SFTTrainer", "DPOTrainer", "GRPOTrainer", "RewardTrainer"])
def test_no_trainer_of_trl_overrides_what_the_mixin_replaces(name: str) -> None:
    """`test_trainer_setup` shows that the other methods of the mixin call the trainer's."""
    from offload.integrations.transformers import OffloadMixin

    kind = getattr(trl, name)
    between = [each for each in kind.__mro__ if issubclass(each, transformers.Trainer)]
    theirs = {method for each in between[:-1] for method in vars(each)}
    common = theirs & vars(OffloadMixin).keys() - {"__init__", "__module__", "__doc__"}
    assert common - {"training_step", "__firstlineno__", "__static_attributes__"} == LOADS_MORE.get(
        name, set()
    )
