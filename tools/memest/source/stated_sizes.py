"""The model that `offload train` builds, and a Llama-like one of it from a few numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import ValidationError

from offload.config.training import MAX_LAYERS, MAX_PARAMS, ModelConfig
from offload.process.disk_cache import remembered
from offload.tiers.cached_layer import CachedLayer
from offload.tiers.errors import ConfigError
from offload.tools.memest.generation import CacheShape
from offload.tools.memest.source.model_source import key_of
from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from torch import nn

_COUNT = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?(?:[eE][+]?\d{1,3})?)\s*([kKmMbBgGtT]?)\s*")
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_VOCAB = 32_000  # Llama 2's
_CONTEXT = 1 << 17  # rotary positions: costs nothing
_ASPECT = 128  # hidden / layers where neither is stated: about that of Llama's 7 B to 70 B


def built_in_model(config: ModelConfig) -> nn.Module:
    """Return the model of `offload train`, on the meta device."""
    import torch

    from offload.gpt import LanguageModel

    with torch.device("meta"):
        return LanguageModel(config)


def built_in_shape(config: ModelConfig, blocks: Sequence[str] = ()) -> ModelShape:
    """Return the groups and units of `built_in_model`, kept on disk; if experts are groups of their
    own, also how many compute a token."""

    def find() -> ModelShape:
        from offload.zero.groups.parameter_grouping import group_parameters

        shape = group_parameters(built_in_model(config), blocks).shape()
        return replace(shape, experts_per_token=config.experts_per_token) if shape.tables else shape

    parts = {"built-in": config.model_dump(mode="json"), "blocks": list(blocks)}
    return remembered("shapes", key_of(parts), ModelShape, find)


def built_in_cache(model: ModelConfig) -> CacheShape:
    """Return the cache of keys and values of the model, if it were served with one."""
    dim = model.hidden // model.heads
    return CacheShape((CachedLayer(model.kv_head_count, dim, dim),) * model.layers)


# ---------------------------------------------------------------- from numbers
def parse_count(text: str) -> int:
    """Return a number of parameters: `7e9`, `7B`, `350M`, `1.5T`, `7_000_000_000`. Raise
    ConfigError if it is none."""
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text[:40]!r} is no number of parameters; write for example 7e9, 7B or 350M"
        )
    number, unit = match.groups()
    value = float(number.replace("_", "")) * _FACTORS[unit.lower()]
    if not 1 <= value <= MAX_PARAMS:
        raise ConfigError(
            f"{text.strip()[:40]!r} is no number of parameters from 1 to {MAX_PARAMS:.0e}"
        )
    return round(value)


@dataclass(frozen=True)
class StatedSizes:
    """The known sizes of a model, each at least 1; the others are derived."""

    params: int | None = None
    layers: int | None = None
    hidden: int | None = None
    vocab: int | None = None


def model_of(sizes: StatedSizes) -> tuple[ModelConfig, tuple[str, ...]]:
    """Return a model with the most parameters up to `sizes.params` that its MLP can have, and notes
    on what is assumed. Raise ConfigError if the sizes do not make a model."""
    layers, hidden, notes = _depth_and_width(sizes)
    vocab = _VOCAB  # or one that takes two fifths of a small model's parameters; bytes are tokens
    if sizes.params is not None:
        vocab = max(256, min(vocab, sizes.params // (5 * hidden) // 64 * 64))
    base: dict[str, object] = {
        "layers": layers, "hidden": hidden, "heads": _heads_for(hidden), "tied": False,
        "vocab": sizes.vocab or vocab, "max_sequence": _CONTEXT,
    }  # fmt: skip
    if sizes.params is None:
        config = _config(base)
    else:
        config = _config({**base, "mlp": _mlp_for(sizes.params, _config({**base, "mlp": 1}))})
        notes = (*notes, f"the MLP is {config.mlp_width} wide, for {sizes.params:,} parameters")
    if sizes.vocab is None:
        notes = (*notes, f"a vocabulary of {config.vocab:,} is assumed")
    return config, notes


def _depth_and_width(sizes: StatedSizes) -> tuple[int, int, tuple[str, ...]]:
    """Return layers and hidden, from a Llama-like 12 x layers x hidden^2 if they are not stated."""
    layers, hidden, params = sizes.layers, sizes.hidden, sizes.params
    if layers is not None and hidden is not None:
        return layers, hidden, ()
    if params is None:
        raise ConfigError(
            "which size? give --params, or --layers and --hidden, for example "
            "--params 7e9 --layers 32 --hidden 4096"
        )
    if hidden is not None:
        layers = max(1, min(MAX_LAYERS, round(params / (12 * hidden * hidden))))
    else:
        if layers is None:
            layers = max(1, min(MAX_LAYERS, round((params / (12 * _ASPECT**2)) ** (1 / 3))))
        width = math.sqrt(params / (12 * layers))
        step = 128 if width >= 512 else 16  # divisible into heads
        hidden = max(step, round(width / step) * step)
    return layers, hidden, (f"{layers} layers of width {hidden} are assumed",)


def _heads_for(hidden: int) -> int:
    """Return the number of heads of 128, or of the even size closest to it that `hidden` allows."""
    fitting = [heads for heads in divisors(hidden) if (hidden // heads) % 2 == 0]
    if not fitting:
        raise ConfigError(f"--hidden {hidden} cannot be divided into heads of an even size")
    return min(fitting, key=lambda heads: abs(hidden / heads - 128))


def _mlp_for(params: int, narrowest: ModelConfig) -> int:
    """Return the width of the widest MLP with which the model has at most `params` parameters."""
    per_width = 3 * narrowest.hidden * narrowest.layers
    norms = (2 * narrowest.layers + 1) * narrowest.hidden
    min_params = narrowest.numel + norms
    if min_params > params:
        raise ConfigError(
            f"--params {params:,}: {narrowest.layers} layers of width {narrowest.hidden} and a "
            f"vocabulary of {narrowest.vocab:,} already have {min_params:,}; lower one of them"
        )
    return 1 + (params - min_params) // per_width


def _config(values: dict[str, object]) -> ModelConfig:
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"--{key}: ".replace("_", "-") for key in first["loc"]) or "--"
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}{reason[:1].lower()}{reason[1:]}") from None


def divisors(number: int) -> list[int]:
    """Return all divisors, the smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    large = [number // n for n in reversed(small) if n * n != number]
    return small + large
