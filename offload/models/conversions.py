"""Conversions of a model in tiers: `model.half()`, `.to(...)`, `.cuda()`, `.share_memory()`, ...

Parameters in tiers have the format and the device that the configuration says. A function that
would change either is refused at the call; others do what they do to any model, buffers included.
All of them call `Module._apply`, here one that asks first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.tiers.errors import UnsupportedError
from offload.zero.groups.store import WeightStore


class Conversions:
    """Checks conversions of all modules that have parameters in tiers, until `remove`."""

    def __init__(self, model: nn.Module, store: WeightStore) -> None:
        self._modules = [
            module for module in model.modules()
            if any(store.spec_of(param) is not None for param in module.parameters())
        ]  # fmt: skip
        for module in self._modules:
            vars(module)["_apply"] = partial(_apply, module, store)

    def remove(self) -> None:
        """Let the modules convert by themselves again."""
        for module in self._modules:
            vars(module).pop("_apply", None)


def _apply(
    module: nn.Module, store: WeightStore, fn: Callable[[Any], Any], recurse: bool = True
) -> nn.Module:
    """Call `module._apply(fn, recurse)`. Raises UnsupportedError for a conversion that tiers cannot
    follow."""
    # all parameters in tiers have one format and are computed with on one device
    probe = torch.empty(1, 1, dtype=store.dtype, device=store.device)
    becomes = fn(probe)
    if becomes.is_cpu and becomes.is_shared():
        raise UnsupportedError(
            f"{type(module).__name__}.share_memory(): the memory of parameters is of their tiers, "
            "which other processes cannot share; give them model.state_dict(), or a checkpoint"
        )
    if _described(becomes) != _described(probe):
        raise UnsupportedError(
            f"a conversion of {type(module).__name__} would make its parameters "
            f"{_described(becomes)}, and in their tiers they are {_described(probe)}; set "
            "precision (fp32, bf16 or fp16) and device in the configuration, and leave out what "
            "moves models to save memory; take model.state_dict() for converted copies, and close "
            "the engine, or offload.dispatched(model), to drop the values"
        )
    is_torchs = getattr(fn, "__module__", "") == nn.Module.__module__

    def applied(tensor: Any) -> Any:
        # torch's own functions keep values; what another one makes is written to the tiers
        keeps = is_torchs and store.spec_of(tensor) is not None
        return tensor if keeps else fn(tensor)

    converted: nn.Module = type(module)._apply(module, applied, recurse)
    return converted


def _described(tensor: torch.Tensor) -> str:
    shape = "" if tensor.dim() == 2 else " of another shape"
    return f"{tensor.dtype} on {tensor.device}{shape}"
