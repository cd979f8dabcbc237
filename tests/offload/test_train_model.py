"""The built-in models: shapes, ties, seeds, checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from offload.config.training import ModelConfig
from offload.gpt import LanguageModel, generate

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


@pytest.mark.parametrize(
    ("sizes", "fragment"),
    [
        ({"hidden": 25}, "hidden: 25 is not a multiple of heads: 4"),
        ({"hidden": 12}, "is odd"),
        ({"kv_heads": 3}, "heads: 4 is not a multiple of kv_heads: 3"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ValidationError, match=fragment):
        ModelConfig(**{**SMALL, **sizes})
