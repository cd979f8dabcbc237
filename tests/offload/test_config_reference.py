"""The configuration in words: `offload config explain`, and what the site shows."""

from __future__ import annotations

from typing import Any

import pytest

from offload.config import OffloadConfig
from offload.config.file import parse_document
from offload.config.optimizer import BESIDE_MUON, KINDS
from offload.config.reference import Key, explained, reference
from offload.errors import ConfigError

KEYS = {key.name: key for key in reference().all()}
VALUES = [key for key in KEYS.values() if not key.keys]
MUONS = ("ns_dtype", *BESIDE_MUON)  # keys that no param group has
NEEDED: dict[str, dict[str, Any]] = {  # beside a key, for its value to be accepted
    "optimizer.dampening": {"momentum": 0.9},
    "optimizer.nesterov": {"momentum": 0.9},
    "train.model.experts_per_token": {"experts": 8},
    "train.model.expert_mlp": {"experts": 8},
    "train.model.aux_loss": {"experts": 8},
    "written_for": {"model": "llama", "parameters": 100, "batch": 1, "sequence": 8},
    "storage": {"weights": "int8"},
}


def configured(key: Key) -> tuple[dict[str, Any], dict[str, Any]]:
    """The key's example with what it needs, and the section in it that has the key."""
    values: dict[str, Any] = parse_document(key.example, "example").value
    inner = values
    for part in key.path[:-1]:
        inner = inner[part]
    for name in (key.name, ".".join(key.path[:-1])):
        for other, value in NEEDED.get(name, {}).items():
            inner.setdefault(other, value)
    if key.path[0] == "optimizer" and key.path[-1] != "type":
        types = [name for name, kind in KINDS.items() if key.path[-1] in kind.defaults]
        inner["type"] = "adamw" if not types or "adamw" in types else types[0]
        if key.path[-1] in MUONS:
            inner["type"] = "muon"
    if key.path[0] == "loss_scale" or key.name == "optimizer.master":
        values["precision"] = "fp16"
    return values, inner


@pytest.mark.parametrize("key", VALUES, ids=lambda key: key.name)
def test_an_example_is_a_configuration_that_has_the_key(key: Key) -> None:
    values, inner = configured(key)
    OffloadConfig.load(values)
    assert key.path[-1] in inner
    assert "\n" not in key.example
    assert key.type
    assert key.meaning.endswith(".")
    assert max(map(len, key.example.splitlines())) < 96


@pytest.mark.parametrize("key", VALUES, ids=lambda key: key.name)
def test_the_default_that_is_shown_changes_nothing(key: Key) -> None:
    """Checked where the default is one value: `auto`, a number, a word."""
    text = key.default.partition(" (")[0]
    if text in ("none", "[]") or " " in text:
        return
    values, inner = configured(key)
    inner[key.path[-1]] = parse_document(text, "default").value
    shown = OffloadConfig.load(values)
    del inner[key.path[-1]]
    assert OffloadConfig.load(values) == shown


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("optimizer.state", "did you mean `states`?"),
        ("states", "did you mean `optimizer.states`?"),
        ("optimzer", "did you mean `optimizer`?"),
        ("OPTIMIZER.LRR", "did you mean `lr`?"),
        ("checkpoint", "did you mean `placement.activations.checkpoint`?"),
        ("budget.xyz", "allowed: device, host, nvme"),
        ("nonsense", "allowed: device, precision, seed"),
    ],
)
def test_a_key_that_is_not_there_names_the_nearest(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explained(name)
    assert str(caught.value).startswith(f"{name}: unknown key")
    assert said in str(caught.value)
