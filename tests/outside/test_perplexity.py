"""Perplexity by windows: the mean loss of each token with what its window has before it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import offload
from offload.cli.app import app
from offload.errors import ConfigError, UnsupportedError
from tests.docs.setups import language_model
from tests.offload.engine_cases import HOST, NVME, config
from tests.outside.zoo import transformers

TOKENS = torch.randint(0, 64, (57,), generator=torch.Generator().manual_seed(0))


def by_definition(model: Any, window: int, stride: int) -> float:
    """One token at a time, each with the start of the first window that reaches it."""
    total = 0.0
    for number in range(1, len(TOKENS)):
        start = 0
        while start + window <= number:
            start += stride
        with torch.no_grad():
            logits = model(input_ids=TOKENS[None, start : number + 1]).logits[0, -2].double()
        total -= float(logits.log_softmax(-1)[TOKENS[number]])
    return math.exp(total / (len(TOKENS) - 1))


@pytest.mark.sample(3)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("window", "stride"), [(16, 8), (16, 5), (16, 15), (2, 1), (64, 32)])
def test_each_token_is_scored_once_with_what_its_window_has(
    window: int, stride: int, batch: int
) -> None:
    model = language_model().eval()
    found = offload.perplexity(model, TOKENS, window=window, stride=stride, batch=batch)
    assert found.tokens == len(TOKENS) - 1
    assert found.value == pytest.approx(by_definition(model, window, stride), rel=1e-5)
    assert found.value == pytest.approx(math.exp(found.loss))


@pytest.mark.sample(2)
@pytest.mark.parametrize("placement", [HOST, NVME])
def test_a_dispatched_model_has_the_same(placement: Any, tmp_path: Path) -> None:
    expected = offload.perplexity(language_model(), TOKENS, window=16, stride=8)
    model = offload.dispatch(language_model(), config(tmp_path, placement))
    with offload.dispatched(model):
        assert offload.perplexity(model, TOKENS, window=16, stride=8) == expected


@pytest.mark.parametrize(
    "keys", [{"window": 1}, {"stride": 0}, {"window": 8, "stride": 8}, {"batch": 0}], ids=str
)
def test_sizes_that_cannot_be_are_refused(keys: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="window has at least 2 tokens"):
        offload.perplexity(language_model(), TOKENS, **{"window": 16, "stride": 8, **keys})


def test_a_window_beyond_the_models_positions_and_other_models_are_refused() -> None:
    model = language_model()
    model.config.max_position_embeddings = 32
    with pytest.raises(ConfigError, match="the model has 32 positions"):
        offload.perplexity(model, TOKENS)
    with pytest.raises(ConfigError, match="has 1 tokens"):
        offload.perplexity(model, [3])
    with pytest.raises(UnsupportedError, match="gives no logits for each token"):
        offload.perplexity(model.model, TOKENS, window=16, stride=8)


def test_the_command_computes_from_a_folder(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path / "model"
    language_model().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{n}" for n in TOKENS.tolist()))
    command = ["perplexity", str(folder), str(text), "--window", "16", "--stride", "8"]
    result = CliRunner().invoke(app, [*command, "-o", f"nvme.paths=[{tmp_path}]"])
    assert result.exit_code == 0, result.output
    expected = offload.perplexity(language_model(), TOKENS, window=16, stride=8)
    assert f"perplexity {expected.value:.4f}" in result.output
    assert "on 56 tokens of text.txt" in result.output
    text.write_bytes(b"\xff\xfe\xfa")
    assert CliRunner().invoke(app, command).exit_code == 2
    (folder / "tokenizer.json").unlink()
    text.write_text("w1 w2")
    assert CliRunner().invoke(app, command).exit_code == 2
