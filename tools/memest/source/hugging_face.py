"""Reads a model from a Hugging Face `config.json`, without torch if its family is known.

Nothing is executed from a model folder: classes come from the installed transformers alone,
`auto_map` (code beside the weights) is never followed.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.config.training import MOST_LAYERS, MOST_SIZE
from offload.tiers.errors import ConfigError
from offload.tools.memest.source.config_keys import Keys
from offload.tools.memest.source.decoder_tree import decoder_tree
from offload.tools.memest.source.error_text import shown
from offload.tools.memest.source.family import FAMILIES, Family
from offload.zero.groups.module_tree import ModuleTree

# `attn_implementation`, `_experts_implementation_internal`, ...: in transformers the name of a
# repository there is code that is fetched and run.
_CODE_KEY = re.compile(r"_*\w*implementation(_internal)?")
_LAYERS_KEY = re.compile(r"(num|n)_(\w+_)?layers?|num_layers|depth")
_SIZE_KEY = re.compile(r"\w+_(size|dim|rank)|(num|n|d)_\w+")
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class ModelConfiguration:
    """The checked top level of a `config.json`."""

    where: str
    values: Mapping[str, Any]
    model_type: str
    architecture: str | None  # the class that is trained, if the file says so

    @property
    def family(self) -> Family | None:
        """The description of its family's modules; None if there is none that fits."""
        family = FAMILIES.get(self.model_type)
        if family is None or self.architecture not in (None, family.architecture):
            return None
        return None if self.values.get("add_cross_attention") else family

    def keys(self, family: Family) -> Keys:
        return family.keys(self.values, self.where)

    @property
    def context(self) -> int | None:
        """The longest sequence in tokens, if the file or its family states one."""
        inner = self.values.get("text_config")
        family = FAMILIES.get(self.model_type)
        stated = (self.values, inner, family.defaults if family is not None else None)
        found = (first_size(each, CONTEXT_KEYS) for each in stated if isinstance(each, dict))
        return next((size for size in found if size is not None), None)

    @property
    def precision(self) -> str | None:
        """The format of its weights, if the file states one that tiers hold."""
        inner = self.values.get("text_config")
        for values in (self.values, inner if isinstance(inner, dict) else {}):
            named = values.get("dtype", values.get("torch_dtype"))
            if isinstance(named, str) and named.removeprefix("torch.") in _PRECISIONS:
                return _PRECISIONS[named.removeprefix("torch.")]
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the keys of the file that are ignored."""
        notes = []
        if "auto_map" in self.values:
            notes.append("auto_map names code in the model folder, which is not executed")
        notes += [
            f"{key}: {shown(value)} names code of a repository, which is neither fetched nor run"
            for key, value in sorted(set(_repositories(self.values)))
        ]
        if self.values.get("quantization_config") is not None:
            notes.append("quantization_config is left aside: training is estimated unquantised")
        if self.architecture is None:
            notes.append("no architecture is named: taken as a causal language model")
        return tuple(notes)


def first_size(values: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """Return the first size among some keys that can be used."""
    found = (values.get(name) for name in names)
    sizes = (v for v in found if isinstance(v, int) and not isinstance(v, bool) and v > 0)
    return next(sizes, None)


def names_code(key: str) -> bool:
    """Whether a key chooses code outside of the library."""
    return _CODE_KEY.fullmatch(key) is not None


def _repositories(values: Any) -> Iterator[tuple[str, str]]:
    """Yield the repositories whose code would be fetched: `org/repo` under a key that names code,
    at any depth, with the key."""
    if isinstance(values, list):
        for inner in values:
            yield from _repositories(inner)
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        if names_code(key):
            named = value.values() if isinstance(value, dict) else [value]
            yield from ((key, name) for name in named if isinstance(name, str) and "/" in name)
        else:
            yield from _repositories(value)


def check_sizes(values: Any, where: str) -> None:
    """Raise ConfigError for a size that no model has, before a library uses it."""
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        check_sizes(value, where)
        layers = _LAYERS_KEY.fullmatch(key)
        most = MOST_LAYERS if layers else MOST_SIZE
        sized = layers or _SIZE_KEY.fullmatch(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if sized and number and most < value < math.inf:
            raise ConfigError(f"{where}: {key} is {shown(value)}; it must be from 1 to {most}")


def check_configuration(values: Any, where: str) -> ModelConfiguration:
    """Return the top level of parsed JSON. Raise ConfigError if it does not describe a model."""
    if not isinstance(values, dict):
        held = "a list" if isinstance(values, list) else shown(values)
        raise ConfigError(f"{where}: is no model configuration: it holds {held}, not an object")
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        problem = "no model_type" if model_type is None else f"model_type is {shown(model_type)}"
        raise ConfigError(
            f"{where}: is no model configuration: {problem}; a Hugging Face config.json has "
            '"model_type": "llama" or the like'
        )
    architectures = values.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise ConfigError(f"{where}: architectures is {shown(architectures)}; a list of names")
    check_sizes(values, where)
    first = architectures[0] if architectures else None
    return ModelConfiguration(where, values, model_type, first)


def family_tree(configuration: ModelConfiguration) -> ModuleTree | None:
    """Return the modules, without torch; None if the family is not described here."""
    family = configuration.family
    if family is None:
        return None
    keys = configuration.keys(family)
    check_heads(keys)
    if family.mixture:
        _check_experts(keys)
    return decoder_tree(family, keys)


def _check_experts(keys: Keys) -> None:
    chosen, experts = keys.size_or("num_experts_per_tok", 1), keys.size("num_local_experts")
    if chosen > experts:
        raise ConfigError(
            f"{keys.where}: num_experts_per_tok {chosen} is more than the {experts} experts"
        )


def check_heads(keys: Keys) -> None:
    """Raise ConfigError unless the heads divide the width, and the groups divide the heads."""
    hidden = keys.raw("hidden_size") and keys.size("hidden_size")
    heads = keys.raw("num_attention_heads") and keys.size("num_attention_heads")
    if not hidden or not heads:
        return
    if keys.raw("head_dim") is None and keys.raw("v_head_dim") is None and hidden % heads:
        raise ConfigError(
            f"{keys.where}: hidden_size {hidden} is no multiple of num_attention_heads {heads}"
        )
    groups = keys.size_or("num_key_value_heads", heads)
    if heads % groups:
        raise ConfigError(
            f"{keys.where}: num_attention_heads {heads} is no multiple of "
            f"num_key_value_heads {groups}"
        )


def unknown_architecture(configuration: ModelConfiguration, known: list[str]) -> ConfigError:
    """Return the error for an unknown `model_type`, with the known ones that are spelt like it."""
    like = difflib.get_close_matches(configuration.model_type, known, n=3)
    hint = f"; did you mean {' or '.join(like)}?" if like else ""
    return ConfigError(
        f"{configuration.where}: the architecture {configuration.model_type[:60]!r} is unknown"
        f"{hint} ({len(known)} are known: {', '.join(sorted(FAMILIES)[:6])}, ...; `pip install -U "
        "transformers` may know more; code of a model folder is not executed)"
    )
