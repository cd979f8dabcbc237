"""Training a model again that is in tiers already: finding its owner, and taking it over."""

from pathlib import Path
from typing import Any

from torch import nn

from offload.config import OffloadConfig
from offload.engine import Engine, ParamGroups, initialize
from offload.tiered_model import TieredModel
from offload.tiers.errors import StateError
from offload.zero.hooks.unit_hooks import UnitHooks


def engine_of(model: nn.Module) -> Engine | None:
    """Return the open engine that trains `model`, a part of it, or a model that it is a part of;
    None if there is none. Raises StateError if parts of it train through several."""
    engines = [each for each in tiers_of(model) if isinstance(each, Engine)]
    if len(engines) > 1:
        raise StateError(
            f"parts of this {type(model).__name__} train through {len(engines)} engines; ask "
            "offload.engine_of for each part"
        )
    return engines[0] if engines else None


def tiers_of(model: nn.Module) -> list[TieredModel]:
    """Return the open owners of tiers that hold `model` or parts of it, to train or to compute."""
    owners = dict.fromkeys(UnitHooks.owner_of(module) for module in model.modules())
    return [each for each in owners if isinstance(each, TieredModel) and not each.is_closed]


def engine_for(
    model: nn.Module, config: OffloadConfig, *, parameters: ParamGroups | None = None,
    weights: str | Path | None = None,
) -> Engine:  # fmt: skip
    """Return an engine as `offload.initialize` does, for a model that may be in tiers already: its
    weights go through RAM, and the optimizer begins anew. `weights` are for a model on the meta
    device.

    Raises the errors of `initialize` and `close`; those of `close` (no room for the weights in RAM)
    and of numbers in param groups leave everything unchanged.
    """
    open_ones = tiers_of(model)
    groups: Any = None if parameters is None else list(parameters)
    for each in open_ones:
        if isinstance(each, Engine) and each.module is model:
            each.check_numbers(groups or [], config.optimizer)
    for each in open_ones:
        each.close("host")
    on_meta = any(param.is_meta for param in model.parameters())
    return initialize(model, config, parameters=groups, weights=weights if on_meta else None)
