"""Families described without torch have the modules that transformers builds, to the last name."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from offload.tools.memest.source.decoder_tree import decoder_tree
from offload.tools.memest.source.family import FAMILIES, Family
from offload.zero.groups.discovery import discover, tree_of
from offload.zero.groups.module_tree import ModuleTree, shape_of

transformers = pytest.importorskip("transformers")
CAUSAL: dict[str, str] = dict(
    importlib.import_module("transformers.models.auto.modeling_auto")
    .MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
)  # fmt: skip
DRAWS = 6  # odd configurations of each family

TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "n_embd": 32, "intermediate_size": 48, "n_inner": 48,
    "moe_intermediate_size": 16, "num_hidden_layers": 3, "n_layer": 3, "num_attention_heads": 4,
    "n_head": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "n_positions": 64, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "layer_types": None, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ODD: dict[str, list[Any]] = {
    **{flag: [False, True] for flag in ("attention_bias", "mlp_bias", "tie_word_embeddings")},
    "head_dim": [16, None], "num_key_value_heads": [1, 4], "intermediate_size": [56, 4096],
    "n_inner": [None, 40], "decoder_sparse_step": [1, 2], "mlp_only_layers": [[0], []],
    "vocab_size": [64, 4000],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def configurations(model_type: str) -> Iterator[Any]:
    """A tiny configuration and odd ones, as far as the library accepts them."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    made = config_class()
    known = {key for key in {*TINY, *ODD} if hasattr(made, key)}
    base = {k: v for k, v in TINY.items() if k in known}
    yield config_class(**copy.deepcopy(base))
    generator = random.Random(model_type)
    drawn = 0
    while drawn < DRAWS:
        odd = {key: generator.choice(v) for key, v in ODD.items() if generator.random() < 0.6}
        try:
            odd = {key: value for key, value in odd.items() if key in known}
            config = config_class(**copy.deepcopy({**base, **odd}))
            with torch.device("meta"):
                transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
        except Exception:  # noqa: BLE001 - a combination that the library refuses
            drawn += 0.25
            continue
        drawn += 1
        yield config


def saved(config: Any, *, only_changes: bool) -> dict[str, Any]:
    """The configuration as a file has it: everything, or what differs from the defaults."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=only_changes))
    return values


def differences(family: Family, tree: ModuleTree, model: torch.nn.Module) -> list[str]:
    found = []
    real = discover(model).shape()
    ours = replace(shape_of(tree), experts_per_token=real.experts_per_token)  # of the file
    if ours != real:
        mine = {p.names: p.shape for group in ours.groups for p in group.params}
        theirs = {p.names: p.shape for group in real.groups for p in group.params}
        found += [f"{n}: {mine.get(n)} {theirs.get(n)}" for n in {*mine, *theirs}
                  if mine.get(n) != theirs.get(n)][:3] or ["order or units"]  # fmt: skip
    described = {module.class_name for module in tree.modules()}
    built = {m.class_name for m in tree_of(model).modules() if next(m.parameters(), None)}
    return [*found, *(f"class {name}" for name in described ^ built)]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_described_as_transformers_builds_it(model_type: str) -> None:
    family = FAMILIES[model_type]
    for number, config in enumerate(configurations(model_type)):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
        keys = family.keys(saved(config, only_changes=bool(number % 2)), "a test")
        assert differences(family, decoder_tree(family, keys), model) == [], config
    assert number >= 1
    assert type(model).__name__ == family.architecture == CAUSAL[model_type]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_keys_that_a_file_leaves_out_have_the_librarys_defaults(model_type: str) -> None:
    made = transformers.CONFIG_MAPPING[model_type]()
    wrong = {
        key: (value, getattr(made, key))
        for key, value in FAMILIES[model_type].defaults.items()
        if value is not None and getattr(made, key) != value
    }
    assert wrong == {}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_librarys_other_names_of_keys_are_understood(model_type: str) -> None:
    config_class = transformers.CONFIG_MAPPING[model_type]
    sizes = {"hidden_size", "num_hidden_layers", "num_experts", "num_local_experts"}
    known = {k: v for k, v in config_class.attribute_map.items() if k in sizes and v != k}
    assert known.items() <= dict(FAMILIES[model_type].aliases).items()
