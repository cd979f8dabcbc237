"""A model with some of its blocks, as DeepSpeed's layer reduction ("teacher_layer") and the
depth-pruning literature begin with one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from offload.tiers.errors import ConfigError, UnsupportedError

_PLACES = ("layer_idx", "layer_id", "layer_number", "block_idx")  # of a block, which change


def keep_layers(model: PreTrainedModel, kept: Sequence[int]) -> None:
    """Leave out all other blocks, in place, also of the model's configuration.

    ConfigError for numbers that are not there or not in order; UnsupportedError for a model in
    which a block's place changes what it computes.
    """
    settings: Any = model.config.get_text_config()
    count = getattr(settings, "num_hidden_layers", None)
    if not isinstance(count, int):
        raise UnsupportedError(f"layers: {type(settings).__name__} has no num_hidden_layers")
    if not kept or sorted(set(kept)) != list(kept) or not 0 <= kept[0] <= kept[-1] < count:
        raise ConfigError(f"layers: expected numbers from 0 to {count - 1} in order, got {kept}")
    found = [
        (name, module) for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]  # fmt: skip
    if len(found) != 1:
        raise UnsupportedError(
            f"layers: {type(model).__name__} has {len(found)} lists of {count} blocks, and it is "
            "not known which of them to cut; save a model that you have cut yourself"
        )
    name, blocks = found[0]
    model.set_submodule(name, nn.ModuleList([blocks[number] for number in kept]))
    for key, value in list(vars(settings).items()):
        if "layer" in key and isinstance(value, list | tuple) and len(value) == count:
            setattr(settings, key, [value[number] for number in kept])
    settings.num_hidden_layers = len(kept)
    _check_rebuilt(model, name)


def _check_rebuilt(model: PreTrainedModel, blocks: str) -> None:
    """That a model built from the configuration is this one, but for values."""
    kind: Any = type(model)
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            other = kind(copy.deepcopy(model.config))
    except Exception as error:
        raise UnsupportedError(
            f"layers: {kind.__name__} cannot be built with fewer blocks: {error}"
        ) from error
    ours, theirs = (
        {n: tuple(p.shape) for n, p in each.named_parameters()} for each in (model, other)
    )
    if ours != theirs:
        names = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
        raise UnsupportedError(
            f"layers: {names[0]} is not the same in a {kind.__name__} with fewer blocks, whose "
            "configuration has blocks by their place; keep others"
        )
    modules = dict(other.named_modules())
    for name, module in model.get_submodule(blocks).named_modules(prefix=blocks):
        one, two = _numbers(module), _numbers(modules[name])
        if one != two:
            key = next(key for key in one if one[key] != two.get(key))
            raise UnsupportedError(
                f"layers: {name}.{key} is {one[key]} in its old place and {two.get(key)} in the "
                "new one; keep others"
            )


def _numbers(module: nn.Module) -> dict[str, Any]:
    """What a module has noted of its settings."""
    return {
        key: value for key, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and key not in (*_PLACES, "name_or_path")
        and not key.startswith("_") and key != "training"
    }  # fmt: skip
