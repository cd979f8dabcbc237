"""LoRA put in by PEFT before `offload.initialize` trains, saves and merges as without an engine.

`make test-libraries` installs PEFT and runs this file.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import offload
from offload.engine_lookup import engine_of
from tests.libraries.rows import Result, adamw, row
from tests.outside.test_pretrained_save import assert_same_files
from tests.outside.trainer_cases import (
    BLOCKS,
    LENGTH,
    NUMBERS,
    PLACEMENTS,
    VOCABULARY,
    Rows,
    assert_close,
    plain_optimizer,
    settings,
    tiny_llama,
    transformers,
    values_of,
)

peft = pytest.importorskip("peft")

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "head": {"modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
}
CLIP = 0.02


def adapted(kind: str, base: Any = None) -> Any:
    keys = {"target_modules": ["q_proj", "v_proj", "gate_proj"], **KINDS[kind]}
    model = tiny_llama() if base is None else base
    torch.manual_seed(5)
    lora = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, task_type="CAUSAL_LM", **keys)
    return peft.get_peft_model(model, lora)


def train(model: Any, optimizer: Any) -> list[tuple[float, float]]:
    """Losses and gradient norms."""
    rows = []
    model.train()
    for batch in DataLoader(Rows(20, seed=1), batch_size=2):
        loss = model(**batch).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        model.zero_grad()
        rows.append((loss.item(), float(norm)))
    return rows


@torch.no_grad()
def logits(model: Any) -> Tensor:
    tokens = torch.arange(2 * LENGTH).remainder(VOCABULARY).view(2, LENGTH)
    logits: Tensor = model.eval()(input_ids=tokens).logits.clone()
    return logits


def without_engine(kind: str, values: dict[str, Tensor]) -> Any:
    """A model in plain PyTorch with the engine's values."""
    model = adapted(kind)
    model.load_state_dict(values)
    return model


CASES = {
    "lora": row("PEFT", "plain loop, saved and merged", "Llama, LoRA"),
    "dora": row("PEFT", "plain loop, saved and merged", "Llama, DoRA"),
    "head": row("PEFT", "plain loop, saved and merged", "Llama, LoRA, `modules_to_save`"),
    "embedding": row("PEFT", "plain loop, saved and merged", "Llama, LoRA of the embedding"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_lora_trains_saves_and_merges(kind: str, tmp_path: Path) -> None:
    def run(place: str, folder: Path) -> Result:
        model = adapted(kind)
        # an embedding's lora_B magnifies updates of gradients near 1e-8, which are of rounding
        with adamw(place, folder, model, {**NUMBERS, "eps": 1e-6}, **BLOCKS) as optimizer:
            logged, trained = train(model, optimizer), values_of(model)
            model.save_pretrained(folder / "adapter")
            base = without_engine(kind, trained).unload()
            loaded = peft.PeftModel.from_pretrained(base, folder / "adapter")
            assert torch.equal(logits(loaded), logits(model))

            engine = engine_of(model)
            with engine.gathered(model) if engine else nullcontext():
                merged = model.merge_and_unload()
            plain = without_engine(kind, trained).merge_and_unload()
            assert torch.equal(logits(merged), logits(plain))
            merged.save_pretrained(folder / "merged")
            again = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged")
            assert torch.equal(logits(again), logits(plain))
            return logged, trained, values_of(merged)

    CASES[kind](run)(tmp_path)


@pytest.mark.parametrize("kind", [*KINDS, "pissa"])
def test_lora_goes_into_a_model_whose_weights_are_still_in_files(
    kind: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setitem(KINDS, "pissa", {"init_lora_weights": "pissa"})
    tiny_llama().save_pretrained(tmp_path / "base")
    expected_model = adapted(kind)
    expected = train(expected_model, plain_optimizer(expected_model))
    model = adapted(kind, offload.open_pretrained(tmp_path / "base"))
    with offload.initialize(model, settings(tmp_path, PLACEMENTS["nvme"])) as engine:
        assert_close(train(model, engine.optimizer), expected)
        trained = values_of(model)
        assert_close(trained, values_of(expected_model))
        expected_model.load_state_dict(trained)
        with engine.gathered(model):
            merged = model.merge_and_unload()
        for name, each in ("found", merged), ("expected", expected_model.merge_and_unload()):
            each.save_pretrained(tmp_path / name)
    assert_same_files(tmp_path / "found", tmp_path / "expected")


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainers_adapters_are_saved_without_the_models_values(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.integrations.transformers import OffloadTrainer

    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=2, use_cpu=True, report_to=[], save_steps=2
    )
    given = settings(tmp_path, PLACEMENTS["nvme"], optimizer={})
    model = adapted(kind)
    trainer = OffloadTrainer(model, args, train_dataset=Rows(20, seed=1), offload=given)
    trainer.train()
    plain = without_engine(kind, values_of(model))
    plain.save_pretrained(tmp_path / "expected", save_embedding_layers="auto")

    def all_of_it(*_: Any, **__: Any) -> Any:
        raise AssertionError("all of the model in RAM")

    own = type(model).state_dict
    monkeypatch.setattr(
        type(model), "state_dict",
        lambda self, *a, **k: own(self, *a, **k) if k.get("keep_vars") else all_of_it(),
    )  # fmt: skip
    trainer.model.save_pretrained(tmp_path / "found")
    trainer.save_model(str(tmp_path / "again"))
    monkeypatch.undo()
    trainer.engine.close()
    safetensors = pytest.importorskip("safetensors.torch")
    expected, *saved = (
        safetensors.load_file(tmp_path / name / "adapter_model.safetensors")
        for name in ("expected", "found", "again")
    )
    for each in saved:
        assert each.keys() == expected.keys()
        assert all(torch.equal(each[name], expected[name]) for name in expected)


# ---------------------------------------------------------------- QLoRA
STORAGE: dict[str, Any] = {"storage": {"weights": "nf4", "group_size": 32}}


def rounded(kind: str) -> Any:
    """The adapted model on the base that codes give."""
    from tests.offload.storage_cases import round_to

    model = adapted(kind)
    names = [name for name, _ in model.named_parameters() if "lora_" in name]
    round_to(model, "nf4", ["lm_head", *names])
    return model


@pytest.mark.parametrize("kind", ["lora", "dora", "head"])
def test_adapters_are_trained_on_a_base_in_4_bits(kind: str, tmp_path: Path) -> None:
    plain = rounded(kind)
    batch = next(iter(DataLoader(Rows(20, seed=1), batch_size=2)))
    plain_loss = plain(**batch).loss
    plain_loss.backward()
    gradients = {n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None}
    with offload.initialize(rounded(kind), settings(tmp_path, PLACEMENTS["host"])) as engine:
        expected = train(engine.module, engine.optimizer)
        values = values_of(engine.module)
    for home in PLACEMENTS.values():
        model = adapted(kind)
        with offload.initialize(model, settings(tmp_path, home, **STORAGE)) as engine:
            loss = model(**batch).loss
            loss.backward()
            assert torch.equal(loss.detach(), plain_loss.detach())
            actual = {n: engine.gradient(p) for n, p in model.named_parameters()}
            for name, gradient in gradients.items():
                assert torch.equal(actual[name], gradient), name
            engine.optimizer.zero_grad()
            assert train(model, engine.optimizer) == expected
            trained = values_of(model)
            assert all(torch.equal(trained[name], value) for name, value in values.items())
            model.save_pretrained(tmp_path / "adapter")
            answers = logits(model)
        loaded = peft.PeftModel.from_pretrained(rounded(kind).unload(), tmp_path / "adapter")
        assert torch.equal(logits(loaded), answers)


def test_merging_into_a_base_in_4_bits_rounds_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted("lora")
    with offload.initialize(model, settings(tmp_path, PLACEMENTS["nvme"], **STORAGE)) as engine:
        train(model, engine.optimizer)
        before = logits(model)
        with caplog.at_level(logging.WARNING, "offload"), engine.gathered(model):
            merged = model.merge_and_unload()
        assert "the new values are rounded" in caplog.text
        after = logits(merged)
        assert not torch.equal(after, before)
        torch.testing.assert_close(after, before, rtol=0, atol=0.3)
        merged.save_pretrained(tmp_path / "merged")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.equal(logits(again), after)


def test_an_adapter_on_a_dispatched_base_in_4_bits(tmp_path: Path) -> None:
    with offload.initialize(adapted("lora"), settings(tmp_path, PLACEMENTS["host"])) as engine:
        train(engine.module, engine.optimizer)
        engine.module.save_pretrained(tmp_path / "adapter")
    tiny_llama().save_pretrained(tmp_path / "base")
    plain = peft.PeftModel.from_pretrained(rounded("lora").unload(), tmp_path / "adapter")
    expected = logits(plain.requires_grad_(False))
    base = offload.open_pretrained(tmp_path / "base")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    offload.dispatch(model, settings(tmp_path, {"parameters": "nvme"}, **STORAGE))
    with offload.dispatched(model):
        assert torch.equal(logits(model), expected)
