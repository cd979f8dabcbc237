"""The engines of this process, by parameter: DeepSpeed's functions take a parameter alone."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from offload.tiers.errors import StateError

if TYPE_CHECKING:
    from offload.deepspeed.engine import EngineModule

ENGINES: weakref.WeakSet[EngineModule] = weakref.WeakSet()


def engine_of(param: nn.Parameter) -> EngineModule | None:
    """Return the open engine that a parameter trains through; None if there is none."""
    for engine in list(ENGINES):
        if engine.manages(param):
            return engine
    return None


def needed(param: nn.Parameter, what: str) -> EngineModule:
    """Return the open engine of a parameter. Raise StateError if there is none."""
    found = engine_of(param)
    if found is None:
        raise StateError(
            f"{what}: a parameter of shape {tuple(param.shape)} belongs to no engine of "
            "deepspeed.initialize that is open"
        )
    return found
