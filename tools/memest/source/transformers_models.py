"""Models of the installed transformers library, built on the meta device.

Importing its modelling code takes seconds, so shapes are kept on disk. The library's own classes
are all that is used: no code of a model folder, nothing from the network.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.process import machine
from offload.process.disk_cache import remembered
from offload.tiers.errors import ConfigError, OffloadError
from offload.tools.memest.generation import CacheShape
from offload.tools.memest.source.hugging_face import ModelConfiguration, names_code
from offload.tools.memest.source.input_files import one_line
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
_BUILDING = "building the model with transformers, once (a few seconds) ..."
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_SPECIAL = ("Infinity", "-Infinity", "NaN")


@dataclass(frozen=True)
class LibraryModel:
    """The facts about a model from the modules and the configuration that the library builds."""

    shape: ModelShape
    context: int | None  # longest sequence in tokens, where its configuration has one


def is_installed() -> bool:
    """Whether transformers can build models here."""
    return None not in (machine.version_of("transformers"), machine.version_of("torch"))


def library_model(
    configuration: ModelConfiguration, blocks: Sequence[str], build: Callable[[], nn.Module]
) -> LibraryModel:
    """Return the model that `build` builds (`build_on_meta`), which standard error announces; or
    what was found of it before."""

    def find() -> LibraryModel:
        from offload.zero.groups.parameter_grouping import group_parameters

        print(_BUILDING, file=sys.stderr, flush=True)
        model: Any = build()
        shape = group_parameters(model, blocks).shape()
        values = vars(model.config.get_text_config())
        sizes = (values.get(key) for key in _CONTEXT_KEYS)
        return LibraryModel(shape, next((n for n in sizes if isinstance(n, int) and n > 0), None))

    key = key_of({**fingerprint_parts(configuration), "blocks": list(blocks)})
    return remembered("shapes", key, LibraryModel, find)


def library_cache(
    configuration: ModelConfiguration, build: Callable[[], nn.Module]
) -> CacheShape | None:
    """Return the cache of keys and values that the model of `build` fills, by its configuration;
    None if it has none. Kept on disk, as building takes seconds."""

    def find() -> CacheShape | None:
        from offload.kv.paged_cache import cached_layers

        model: Any = build()
        layers = cached_layers(model) if model.can_generate() else ()
        return CacheShape(layers) if layers else None

    key = key_of(fingerprint_parts(configuration))
    return remembered("caches", key, CacheShape | None, find)


def fingerprint_parts(configuration: ModelConfiguration) -> dict[str, Any]:
    """Return everything that a model's graph depends on."""
    versions = {name: machine.version_of(name) or "none" for name in ("torch", "transformers")}
    return {"values": _decoded(configuration.values), "versions": versions}


def build_on_meta(configuration: ModelConfiguration) -> nn.Module:
    """Build the model without memory. Raise ConfigError if transformers is not installed, or does
    not accept it."""
    if not is_installed():
        raise ConfigError(
            f"{configuration.where}: the modules of {configuration.model_type} are not known here "
            "without transformers; install it (`pip install 'offload[hf]'`), or put the "
            "safetensors files beside the configuration"
        )
    with _quiet_and_offline():
        import torch
        import transformers

        if configuration.model_type not in transformers.CONFIG_MAPPING:
            known = list(transformers.CONFIG_MAPPING)
            like = difflib.get_close_matches(configuration.model_type, known, n=3)
            hint = f"; did you mean {' or '.join(like)}?" if like else ""
            raise ConfigError(
                f"{configuration.where}: the architecture {configuration.model_type[:60]!r} is "
                f"unknown{hint} (transformers {machine.version_of('transformers')} has "
                f"{len(known)}; `pip install -U transformers` may know more; code of a model "
                "folder is not executed)"
            )
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
