"""TRL's trainers train through an engine as without one, and resume to the bit.

`make test-libraries` installs TRL and runs this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.zero.groups.group import ParamGroup
from tests.libraries.rows import PLACEMENTS, Result, row
from tests.offload.engine_cases import assert_same_bits, config, seeded
from tests.outside.trainer_cases import (
    ARGUMENTS,
    BLOCKS,
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
Train = Callable[..., Any]  # (wrap, folder, peft_config=, offload=) -> the trainer


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


# --------------------------------------------------------------------------- trainers
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
ROLLOUT: dict[str, Any] = {  # of GRPO and RLOO: generation inside the step
    **ARGUMENTS, "max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
    "num_generations": 4, "max_completion_length": 8, "bf16": False, "save_steps": 2,
    "eval_strategy": "no",
}  # fmt: skip


def mixed(kind: Any) -> Any:
    from offload.integrations.transformers import OffloadMixin

    return type(f"Offload{kind.__name__}", (OffloadMixin, kind), {})


def fine_tuning(wrap: Any, folder: Path, **keys: Any) -> Any:
    args = trl.SFTConfig(output_dir=str(folder), **{**KEYS, "weight_decay": 0.1})
    return wrap(trl.SFTTrainer)(
        model=tiny_llama(), args=args, train_dataset=texts(120, 1), eval_dataset=texts(8, 2),
        processing_class=tokenizer(), **keys,
    )  # fmt: skip


def preference(wrap: Any, folder: Path, **keys: Any) -> Any:
    """Adapters have their reference in the model itself."""
    args = trl.DPOConfig(output_dir=str(folder), **{**KEYS, "weight_decay": 0.1})
    reference = None if "peft_config" in keys else tiny_llama()
    return wrap(trl.DPOTrainer)(
        model=tiny_llama(), ref_model=reference, args=args, train_dataset=preferences(120, 1),
        eval_dataset=preferences(8, 2), processing_class=tokenizer(), **keys,
    )  # fmt: skip


def unpaired(wrap: Any, folder: Path, **keys: Any) -> Any:
    args = trl.KTOConfig(output_dir=str(folder), **{**KEYS, "eval_strategy": "no"})
    reference = None if "peft_config" in keys else tiny_llama()
    rows = preferences(120, 1).rename_column("chosen", "completion").remove_columns("rejected")
    rows = rows.add_column("label", [number % 2 == 0 for number in range(120)])
    return wrap(trl.KTOTrainer)(
        model=tiny_llama(), ref_model=reference, args=args, train_dataset=rows,
        processing_class=tokenizer(), **keys,
    )  # fmt: skip


def reward(wrap: Any, folder: Path, **keys: Any) -> Any:
    settings = tiny_llama().config
    settings.num_labels = 1
    model = seeded(lambda: transformers.LlamaForSequenceClassification(settings))
    rows = preferences(120, 1).remove_columns("prompt")
    args = trl.RewardConfig(output_dir=str(folder), **{**KEYS, "eval_strategy": "no"})
    adapters = keys.pop("peft_config", None)
    if adapters is not None:
        adapters.task_type = "SEQ_CLS"
    return wrap(trl.RewardTrainer)(
        model=model, args=args, train_dataset=rows, processing_class=tokenizer(),
        peft_config=adapters, **keys,
    )  # fmt: skip


def variety(completions: list[str], **_: Any) -> list[float]:
    """The rewards: the number of different words."""
    return [float(len(set(each.split()))) for each in completions]


def rollouts(kind: str, wrap: Any, folder: Path, **keys: Any) -> Any:
    """With adapters, the reference is the model without them."""
    beta = 0.04 if "peft_config" in keys else 0.0
    args = getattr(trl, f"{kind}Config")(output_dir=str(folder), beta=beta, **ROLLOUT)
    prompts = sentences(40, 4, 8, torch.Generator().manual_seed(1))
    return wrap(getattr(trl, f"{kind}Trainer"))(
        model=tiny_llama(), reward_funcs=variety, args=args, processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}), **keys,
    )  # fmt: skip


relative = partial(rollouts, "GRPO")
leave_one_out = partial(rollouts, "RLOO")


ADAPTERS = {"adapters": True}


def trained(
    make: Train, place: str, folder: Path, adapters: bool = False, caches: bool = False
) -> Result:
    """What is logged, weights and the last folder's adapters. An engine's run that is resumed has
    the bits of the whole one."""
    peft = pytest.importorskip("peft")

    def run(name: str, resume: Path | None = None) -> Result:
        keys: dict[str, Any] = {}
        if adapters:
            keys["peft_config"] = seeded(lambda: peft.LoraConfig(**LORA))
        if place == "plain":
            trainer = make(lambda kind: kind, folder / name, **keys)
        else:
            homes = {**PLACEMENTS[place], "kv": place} if caches else PLACEMENTS[place]
            keys["offload"] = config(folder, homes, **BLOCKS)
            trainer = make(mixed, folder / name, **keys)
        trainer.train(resume_from_checkpoint=resume and str(resume))
        found = logged(trainer), values_of(trainer.model)
        assert len(found[0]["loss"]) == trainer.args.max_steps
        if place != "plain":
            trainer.engine.close()
        return found

    found = run("whole")  # seeds the random numbers of rollouts
    saved = (folder / "whole").glob("checkpoint-*")
    first, last = sorted(saved, key=lambda path: int(path.name.split("-")[1]))
    if place != "plain":
        again = run("again", first)
        assert again[0] == found[0]
        assert_same_bits(again[1], found[1])
    if not adapters:
        return found
    files = dict.fromkeys((path.name for path in last.iterdir()), 0)  # are PEFT's
    return *found, files, safetensors.load_file(last / "adapter_model.safetensors")


CASES: dict[str, tuple[Any, Train, dict[str, bool]]] = {
    "sft": (row("TRL", "SFTTrainer", "Llama"), fine_tuning, {}),
    "sft-lora": (row("TRL", "SFTTrainer", "Llama, LoRA"), fine_tuning, ADAPTERS),
    "dpo": (row("TRL", "DPOTrainer, a reference model", "Llama"), preference, {}),
    "dpo-lora": (
        row("TRL", "DPOTrainer, the base as reference", "Llama, LoRA"), preference, ADAPTERS),
    "kto": (row("TRL", "KTOTrainer, a reference model", "Llama"), unpaired, {}),
    "kto-lora": (
        row("TRL", "KTOTrainer, the base as reference", "Llama, LoRA"), unpaired, ADAPTERS),
    "reward": (row("TRL", "RewardTrainer", "Llama with a head for one score"), reward, {}),
    "reward-lora": (
        row("TRL", "RewardTrainer", "Llama with a head for one score, LoRA"), reward, ADAPTERS),
    "grpo": (row("TRL", "GRPOTrainer, generation in the step", "Llama"), relative, {}),
    "grpo-lora": (
        row("TRL", "GRPOTrainer, the base as reference", "Llama, LoRA"), relative, ADAPTERS),
    "grpo-kv": (
        row("TRL", "GRPOTrainer, KV caches of rollouts in tiers", "Llama, LoRA"), relative,
        {**ADAPTERS, "caches": True}),
    "rloo": (row("TRL", "RLOOTrainer, generation in the step", "Llama"), leave_one_out, {}),
    "rloo-lora": (
        row("TRL", "RLOOTrainer, the base as reference", "Llama, LoRA"), leave_one_out, ADAPTERS),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_trainers(case: str, tmp_path: Path) -> None:
    check, make, how = CASES[case]
    check(partial(trained, make, **how))(tmp_path)


def test_the_chunked_loss_reads_the_head_once_in_each_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step of four passes, each forward and backward; not once for each chunk."""
    read, flat = Counter[str](), ParamGroup.flat

    def counted(group: ParamGroup) -> Tensor:
        read[group.layout.params[0].name] += 1
        return flat(group)

    monkeypatch.setattr(ParamGroup, "flat", counted)
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 5)  # of 64 entries
    settings = tiny_llama().config
    settings.tie_word_embeddings = False
    arguments = {**KEYS, "max_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
    trainer = mixed(trl.SFTTrainer)(
        model=seeded(lambda: transformers.LlamaForCausalLM(settings)),
        args=trl.SFTConfig(str(tmp_path), **arguments), train_dataset=texts(16, 1),
        processing_class=tokenizer(), offload=config(tmp_path, PLACEMENTS["nvme"], **BLOCKS),
    )  # fmt: skip
    trainer.train()
    assert read["lm_head.weight"] == 2 * trainer.args.gradient_accumulation_steps
    trainer.engine.close("drop")


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
