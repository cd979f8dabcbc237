"""The configuration in words: `offload config explain`, and what the site shows."""

from __future__ import annotations

from typing import Any

import pytest

from offload.cli.config import print_explanation
from offload.config import OffloadConfig
from offload.config.file import parse_document
from offload.config.optimizer import KINDS
from offload.config.reference import Key, explained, reference
from offload.errors import ConfigError

KEYS = {key.name: key for key in reference().all()}
VALUES = [key for key in KEYS.values() if not key.keys]
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
    if key.path[0] == "loss_scale" or key.name == "optimizer.master":
        values["precision"] = "fp16"
    return values, inner


def test_every_key_of_the_models_is_there() -> None:
    def names(schema: dict[str, Any], section: dict[str, Any], prefix: str) -> set[str]:
        found = set()
        for name, inner in section["properties"].items():
            found.add(f"{prefix}{name}")
            for part in [inner, *inner.get("anyOf", ())]:
                if "$ref" in part:
                    below = schema["$defs"][part["$ref"].rpartition("/")[2]]
                    found |= names(schema, below, f"{prefix}{name}.")
        return found

    schema = OffloadConfig.model_json_schema()
    assert names(schema, schema, "") == KEYS.keys() - {""}
    assert len(VALUES) > 60


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
    """Where it is one value: `auto`, a number, a word."""
    text = key.default.partition(" (")[0]
    if text in ("none", "[]") or " " in text:
        return
    values, inner = configured(key)
    inner[key.path[-1]] = parse_document(text, "default").value
    shown = OffloadConfig.load(values)
    del inner[key.path[-1]]
    assert OffloadConfig.load(values) == shown


@pytest.mark.parametrize(
    ("name", "type_", "unit", "default"),
    [
        ("zero.stage", "whole number from 0 to 3", "", "3"),
        ("zero.timeout_s", "number above 0 to 1,000,000", "seconds", "600.0"),
        ("budget.host", "size (8GiB, 8GB or a number), percentage or auto", "bytes", "auto"),
        ("optimizer.states", "fp32, bf16, int8, or one of them per tier", "", "fp32"),
        ("optimizer.eps", "number from 0", "", "1.0e-08 (adamw, adam); 1.0e-10 (adagrad)"),
        ("optimizer.amsgrad", "true or false", "", "false (adamw, adam)"),
        ("loss_scale.backoff_factor", "number above 0 and below 1", "", "0.5"),
        ("seed", "whole number from 0 and below 2^63", "", "0"),
        ("nvme.paths", "list of paths", "", "[]"),
        ("clip_grad_norm", "number above 0", "", "no clipping"),
        ("written_for.model", "text", "", "none: it has to be given"),
    ],
)  # fmt: skip
def test_types_units_and_defaults_in_words(name: str, type_: str, unit: str, default: str) -> None:
    key = explained(name)
    assert (key.type, key.unit, key.default) == (type_, unit, default)


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


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", KEYS, ids=lambda name: name or "all")
def test_what_is_printed_fits_the_terminal(
    name: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_explanation(name)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    words = "".join(out.split())
    key = KEYS[name]
    for shown in [
        key.example,
        key.default if not key.keys else "",
        *(k.path[-1] for k in key.keys),
    ]:
        assert "".join(shown.split()) in words
