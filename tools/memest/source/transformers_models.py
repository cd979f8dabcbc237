"""Models that only the installed transformers library knows, built on the meta device.

Importing its modelling code takes seconds, so shapes are kept on disk. The library's own classes
are all that is used: no code of a model folder, nothing from the network.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.planning.machine.disk_cache import remembered
from offload.planning.plan.cache_shape import CacheShape
from offload.process import machine
from offload.tiers.errors import ConfigError, OffloadError
from offload.tools.memest.source.cache_shapes import modules_cache
from offload.tools.memest.source.error_text import one_line
from offload.tools.memest.source.hugging_face import (
    CONTEXT_KEYS,
    ModelConfiguration,
    first_size,
    names_code,
    unknown_architecture,
)
from offload.tools.memest.source.model_source import key_of
from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from torch import nn

# Not of the model, wherever in the file: code of others (kernels of a repository, too, and a map
# that gives them another name), formats of stored weights, choices of one machine.
_IGNORED = (
    "auto_map", "quantization_config", "torch_dtype", "dtype", "_name_or_path", "attribute_map",
    "use_kernels", "_use_kernels", "kernel_config", "allow_all_kernels", "trust_remote_code",
)  # fmt: skip
_BUILT = "the modules were built by transformers, which takes seconds; the next answer will not"
_SPECIAL = ("Infinity", "-Infinity", "NaN")


@dataclass(frozen=True)
class LibraryModel:
    """The facts about a model from the modules and the configuration that the library builds."""

    shape: ModelShape
    context: int | None  # longest sequence in tokens, where its configuration has one
    cache: CacheShape | None  # None: it has none, or its code cannot be followed


def library_model(
    configuration: ModelConfiguration, blocks: Sequence[str], build: Callable[[], nn.Module]
) -> tuple[LibraryModel, tuple[str, ...]]:
    """Return the model that `build` builds (`build_on_meta`), and a note if that took long."""
    notes = []

    def find() -> LibraryModel:
        from offload.zero.groups.discovery import discover

        notes.append(_BUILT)
        model: Any = build()
        shape = discover(model, blocks).shape()
        context = first_size(vars(model.config.get_text_config()), CONTEXT_KEYS)
        return LibraryModel(shape, context, modules_cache(model))

    key = key_of({**fingerprint_parts(configuration), "blocks": list(blocks)})
    return remembered("shapes", key, LibraryModel, find), tuple(notes)


def fingerprint_parts(configuration: ModelConfiguration) -> dict[str, Any]:
    """Return everything that a model's graph depends on."""
    versions = {name: machine.version_of(name) or "none" for name in ("torch", "transformers")}
    return {"values": _decoded(configuration.values), "versions": versions}


def build_on_meta(configuration: ModelConfiguration) -> nn.Module:
    """Build the model without memory. Raise ConfigError if transformers does not accept it."""
    _require_known(configuration)
    with _quiet_and_offline():
        import torch
        import transformers

        if configuration.model_type not in transformers.CONFIG_MAPPING:
            raise unknown_architecture(configuration, list(transformers.CONFIG_MAPPING))
        try:
            config_class = transformers.CONFIG_MAPPING[configuration.model_type]
            config = config_class.from_dict(_decoded(configuration.values))
            with torch.device("meta"):
                model: nn.Module = _build(configuration, config)
        except OffloadError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{configuration.where}: transformers cannot build this "
                f"{configuration.model_type}: {one_line(error)}"
            ) from error
    return model.train()


def _build(configuration: ModelConfiguration, config: Any) -> Any:
    """Build the named class, if it is a model of transformers, else the causal language model."""
    import transformers

    name = configuration.architecture
    model_class: Any = getattr(transformers, name, None) if name is not None else None
    if inspect.isclass(model_class) and issubclass(model_class, transformers.PreTrainedModel):
        return getattr(model_class, "_from_config")(config)  # noqa: B009 - untyped
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{configuration.where}: transformers {machine.version_of('transformers')} has no "
            f"class {name or 'for causal language models'} for {configuration.model_type}"
        )
    return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _decoded(value: Any) -> Any:
    """Return a copy without the ignored keys, and with the floats that transformers writes as
    `{"__float__": "Infinity"}`."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in _SPECIAL:
            return float(value["__float__"])
        kept = {k: v for k, v in value.items() if k not in _IGNORED and not names_code(k)}
        return {key: _decoded(inner) for key, inner in kept.items()}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value


def _require_known(configuration: ModelConfiguration) -> None:
    """Raise ConfigError, before any heavy import, for a type that the library does not name."""
    for name in ("torch", "transformers"):
        if machine.version_of(name) is None:
            raise ConfigError(
                f"{configuration.where}: the modules of {configuration.model_type} are not known "
                f"here without {name}; install transformers (`pip install 'offload[hf]'`)"
            )
    known = _named_types()
    if known and configuration.model_type not in known:
        raise unknown_architecture(configuration, sorted(known))


def _named_types() -> set[str]:
    """Return every string in the library's tables of configurations: more than its types, never
    fewer.

    The result is empty if the tables are not in the place that they have in transformers 5.
    """
    spec = importlib.util.find_spec("transformers")
    folders = spec.submodule_search_locations if spec is not None else None
    named: set[str] = set()
    for name in ("auto_mappings.py", "configuration_auto.py"):
        path = Path(next(iter(folders or [""]))) / "models" / "auto" / name
        if not path.is_file():
            return set()
        named.update(re.findall(r'\(?"([\w.-]+)"(?:, |: )"\w+Config"', path.read_text("utf-8")))
    return named


@contextlib.contextmanager
def _quiet_and_offline() -> Iterator[None]:
    """Silence the library's remarks on a configuration, and disable the network."""
    from huggingface_hub import constants

    offline, disabled = constants.HF_HUB_OFFLINE, logging.root.manager.disable
    constants.HF_HUB_OFFLINE = True
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.disable(disabled)
