"""Another optimizer over an engine's parameters is an error.

`torch.optim.AdamW(model.parameters())`, or a trainer that makes its own optimizer, would keep its
states in RAM, outside of every budget, and page each weight through memory to change it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from offload.memory.watched_stores import WatchedStores
from offload.optimizers.optimizer import OffloadOptimizer
from offload.tiers.errors import UnsupportedError
from offload.zero.groups.store import WeightStore


def refuse_foreign_optimizers(store: WeightStore) -> RemovableHandle:
    """Refuse other optimizers over the store's parameters until the returned handle is removed."""
    return _watched.add(store)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _watched or _is_ours(optimizer):
        return
    for store in _watched:
        _refuse(optimizer, store)


_watched = WatchedStores(lambda: register_optimizer_step_pre_hook(_check))


def _is_ours(optimizer: Any) -> bool:
    """Return whether an optimizer is an OffloadOptimizer, or wraps one."""
    while optimizer is not None and not isinstance(optimizer, OffloadOptimizer):
        inner = getattr(optimizer, "optimizer", None)
        optimizer = inner if inner is not optimizer else None
    return optimizer is not None


def _refuse(optimizer: torch.optim.Optimizer, store: WeightStore) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            spec = store.spec_of(param)
            if spec is not None:
                raise UnsupportedError(
                    f"{type(optimizer).__name__}.step(): {spec.name} trains through an offload "
                    "engine, and only engine.optimizer keeps its states in the tiers; use that "
                    "(transformers: Trainer(..., optimizers=(engine.optimizer, None))), and set "
                    "what this optimizer was made with under optimizer: in the configuration"
                )
