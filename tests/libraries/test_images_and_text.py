"""Models of images and text, tiny, train through an engine as in plain PyTorch: batches of text
alone, with an image, or with several; whole, with a frozen tower, with adapters; on two ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.libraries.rows import PLACEMENTS, Result, adamw, assert_equal, row
from tests.offload.engine_cases import config, seeded
from tests.outside.trainer_cases import quiet, transformers, values_of
from tests.ranks.processes import run_ranks

IMAGE, LENGTH, CLIP = 70, 20, 0.5
NUMBERS: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-3}  # rounding stays small
MIXED = (0, 1, 2, 0, 1, 1)  # images of each sequence, by batch
TEXT: dict[str, Any] = {
    "vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "head_dim": 8,
}  # fmt: skip
TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48}
CLIP_TOWER = {**TOWER, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8}
QWEN_TEXT = {**TEXT, "rope_parameters": {
    "rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}  # fmt: skip
QWEN_TOWER: dict[str, Any] = {
    **TOWER, "depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
    "out_hidden_size": 32,
}  # fmt: skip
QWEN25 = {**QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
QWEN3 = {**QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Qwen2_5_VL": ("visual", QWEN_TEXT, QWEN25, {"image_token_id": IMAGE}),
    "Qwen3VL": ("visual", QWEN_TEXT, QWEN3, {"image_token_id": IMAGE}),
    "Llava": ("vision_tower", {**TEXT, "model_type": "llama"},
        {**CLIP_TOWER, "patch_size": 4, "model_type": "clip_vision_model"},
        {"image_token_index": IMAGE, "image_seq_length": 4, "vision_feature_layer": -1}),
    "Gemma3": ("vision_tower", {**TEXT, "sliding_window": 16, "query_pre_attn_scalar": 8},
        {**CLIP_TOWER, "patch_size": 4, "vision_use_head": False},
        {"image_token_index": IMAGE, "mm_tokens_per_image": 4}),
    "Idefics3": ("vision_model", {**TEXT, "model_type": "llama"}, {**CLIP_TOWER, "patch_size": 2},
        {"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": 0}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def tiny(name: str, kind: str) -> Any:
    """`kind`: "whole", "frozen" (the tower) or "lora" (adapters in the language model alone)."""
    tower, text, vision, more = MODELS[name]
    settings = getattr(transformers, f"{name}Config")
    settings = settings(text_config=text, vision_config=vision, **more)
    model = seeded(lambda: getattr(transformers, f"{name}ForConditionalGeneration")(settings))
    if kind == "frozen":
        for module_name, module in model.named_modules():
            module.requires_grad_(False) if module_name.endswith(tower) else None
    if kind != "lora":
        return model
    peft = pytest.importorskip("peft")
    inside = r".*language_model.*(q_proj|v_proj)" if name != "Idefics3" else r".*text_model.*_proj"
    return seeded(lambda: peft.get_peft_model(model, peft.LoraConfig(target_modules=inside)))


def batch(name: str, images: int, seed: int, rows: int = 2) -> dict[str, Tensor]:
    """What the model's processor makes of `rows` sequences with so many images each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (rows, LENGTH), generator=generator)
    for image in range(images):
        ids[:, 2 + 7 * image : 6 + 7 * image] = IMAGE  # four tokens each
    made = {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100)}
    made["attention_mask"] = torch.ones_like(ids)
    is_qwen, count = name.startswith("Qwen"), rows * images
    if is_qwen or name == "Gemma3":
        made["mm_token_type_ids" if is_qwen else "token_type_ids"] = (ids == IMAGE).long()
    if count and is_qwen:
        made["pixel_values"] = torch.randn(count * 16, 3 * 2 * 4 * 4, generator=generator)
        made["image_grid_thw"] = torch.tensor([[1, 4, 4]] * count)
    elif count:
        shape = (rows, images, 3, 8, 8) if name == "Idefics3" else (count, 3, 8, 8)
        made["pixel_values"] = torch.randn(shape, generator=generator)
    return made


# ------------------------------------------------------------------------- loops
def looped(model: Any, optimizer: Any, data: Sequence[dict[str, Tensor]]) -> Result:
    """A step after every two passes."""
    losses = []
    model.train()
    for number, each in enumerate(data):
        loss = model(**each).loss
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return losses, values_of(model)


def trained(model: Any, folder: Path, data: Any, place: str) -> Result:
    from offload.integrations.transformers import OffloadTrainer

    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=1, max_grad_norm=CLIP,
        gradient_accumulation_steps=2, learning_rate=3e-3, weight_decay=0.1, adam_epsilon=1e-3,
        use_cpu=True, logging_steps=1, report_to=[], remove_unused_columns=False,
        disable_tqdm=True, save_strategy="no", seed=7,
    )  # fmt: skip
    given: dict[str, Any] = {"train_dataset": data, "data_collator": lambda rows: rows[0]}
    if place == "plain":
        trainer = transformers.Trainer(model, args, **given)
    else:
        keys = config(folder, PLACEMENTS[place], **keys_for(place))
        trainer = OffloadTrainer(model, args, offload=keys, **given)
    trainer.train()
    values = values_of(model)
    if place != "plain":
        trainer.engine.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], values


def keys_for(place: str) -> dict[str, Any]:
    """On nvme, with a budget for a part of the states."""
    budget = {"budget": {"host": "2MiB", "nvme": "64MiB"}} if place == "nvme" else {}
    return {"optimizer": {"chunk": 2048}, **budget}


def run(loop: str, name: str, kind: str, images: Sequence[int], place: str, folder: Path) -> Result:
    model = tiny(name, kind)
    data = [batch(name, count, seed) for seed, count in enumerate(images)]
    if loop == "trainer":
        return trained(model, folder, data, place)
    with adamw(place, folder, model, NUMBERS, **keys_for(place)) as optimizer:
        return looped(model, optimizer, data)


CASES = {
    ("loop", "Qwen2_5_VL"): row("transformers", "plain loop", "Qwen2.5-VL, mixed batches"),
    ("loop", "Qwen2_5_VL", "whole", (0, 0)): row("transformers", "plain loop", "Qwen2.5-VL, text"),
    ("loop", "Qwen2_5_VL", "lora"): row("transformers", "plain loop", "Qwen2.5-VL, LoRA on text"),
    ("loop", "Qwen3VL"): row("transformers", "plain loop", "Qwen3-VL, mixed batches"),
    ("loop", "Llava", "whole", (1, 2)): row("transformers", "plain loop", "Llava, images in each"),
    ("loop", "Llava", "frozen"): row("transformers", "plain loop", "Llava, frozen tower"),
    ("loop", "Gemma3"): row("transformers", "plain loop", "Gemma 3, mixed batches"),
    ("loop", "Idefics3", "lora"): row("transformers", "plain loop", "Idefics3, LoRA on text"),
    ("trainer", "Qwen2_5_VL"): row("transformers", "OffloadTrainer", "Qwen2.5-VL, mixed batches"),
    ("trainer", "Qwen3VL", "frozen"): row(
        "transformers", "OffloadTrainer", "Qwen3-VL, frozen tower"
    ),
    ("trainer", "Llava"): row("transformers", "OffloadTrainer", "Llava, mixed batches"),
    ("trainer", "Gemma3", "lora"): row("transformers", "OffloadTrainer", "Gemma 3, LoRA on text"),
    ("trainer", "Idefics3"): row("transformers", "OffloadTrainer", "Idefics3, mixed batches"),
}


@pytest.mark.parametrize("case", CASES)
def test_images_and_text(case: tuple[Any, ...], tmp_path: Path) -> None:
    """Mixed batches: of text alone, one image, two images; a step after every two of them."""
    CASES[case](partial(run, *case, *("whole", MIXED)[len(case) - 2 :]))(tmp_path)


# ------------------------------------------------------------------------- two ranks
TURNS = ((2, 0), (0, 0), (0, 1), (1, 2))  # images on each rank, by step
ON_RANKS = {
    "Qwen2_5_VL": row("transformers", "plain loop, 2 ranks", "Qwen2.5-VL, images on one rank"),
    "Llava": row("transformers", "plain loop, 2 ranks", "Llava, images on one rank"),
}


def on_rank(folder: str) -> list[dict[str, Tensor]]:
    torch.set_num_threads(1)
    results, rank = [], dist.get_rank()
    for name, place in itertools.product(ON_RANKS, PLACEMENTS):
        keys = {**keys_for(place), "zero": {"stage": 3, "timeout_s": 60.0}}
        model = tiny(name, "whole").train()
        with quiet(), adamw(place, Path(folder), model, NUMBERS, **keys) as optimizer:
            for number, images in enumerate(TURNS):
                model(**batch(name, images[rank], 2 * number + rank)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(values_of(model))
    return results


def test_a_rank_has_images_and_the_other_has_none(tmp_path: Path) -> None:
    ranks = run_ranks(2, tmp_path, on_rank, str(tmp_path), timeout_s=240.0)
    for number, name in enumerate(ON_RANKS):
        model = tiny(name, "whole").train()
        with adamw("plain", tmp_path, model, NUMBERS) as optimizer:
            for step, turn in enumerate(TURNS):
                for rank, images in enumerate(turn):
                    (model(**batch(name, images, 2 * step + rank)).loss / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
        found = [values for rank in ranks for values in rank[2 * number : 2 * number + 2]]
        assert_equal([values_of(model), *found])
