"""Checks a Hugging Face `config.json` before transformers builds the model that it describes.

Nothing is executed from a model folder: classes come from the installed transformers alone,
`auto_map` (code beside the weights) is never followed.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.config.training import MAX_LAYERS, MAX_SIZE
from offload.tiers.errors import ConfigError
from offload.tools.memest.source.input_files import shown

# `attn_implementation`, `_experts_implementation_internal`, ...: in transformers the name of a
# repository there is code that is fetched and run.
_CODE_KEY = re.compile(r"_*\w*implementation(_internal)?")
_LAYERS_KEY = re.compile(r"(num|n)_(\w+_)?layers?|num_layers|depth")
_SIZE_KEY = re.compile(r"\w+_(size|dim|rank)|(num|n|d)_\w+")
# Sizes that every model needs: wrong ones are named here, where a library would fail far inside.
_NEEDED = (
    "hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class ModelConfiguration:
    """The checked top level of a `config.json`."""

    where: str
    values: Mapping[str, Any]
    model_type: str
    architecture: str | None  # the class that is trained, if the file says so

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
            for key, value in self.values.items()
            if names_code(key) and "/" in str(value)
        ]
        if self.values.get("quantization_config") is not None:
            notes.append("quantization_config is left aside: training is estimated unquantized")
        if self.architecture is None:
            notes.append("no architecture is named: taken as a causal language model")
        return tuple(notes)


def names_code(key: str) -> bool:
    """Whether a key chooses code outside of the library."""
    return _CODE_KEY.fullmatch(key) is not None


def check_sizes(values: Any, where: str) -> None:
    """Raise ConfigError for a size that no model has, before a library uses it."""
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        check_sizes(value, where)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        is_needed, layers = key in _NEEDED, _LAYERS_KEY.fullmatch(key)
        max_value = MAX_LAYERS if layers else MAX_SIZE
        if is_needed and not (1 <= value <= max_value and value == int(value)):
            raise ConfigError(
                f"{where}: {key} is {shown(value)}; it must be a whole number from 1 to {max_value}"
            )
        if (layers or _SIZE_KEY.fullmatch(key)) and max_value < value < math.inf:
            raise ConfigError(f"{where}: {key} is {shown(value)}; it must be at most {max_value}")


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
