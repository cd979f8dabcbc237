"""`deepspeed.utils`: gradients, masters and optimizer states of one parameter."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from offload.deepspeed.engine import EngineModule, engine_of
from offload.deepspeed.unsupported_names import left_out
from offload.tiers.errors import StateError

logger = logging.getLogger("offload")


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; on all ranks for -1 or if none is given."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if there else 0
    wanted = list(ranks or [])
    if not wanted or -1 in wanted or rank in wanted:
        logger.log(level, "[rank %d] %s", rank, message)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of the gradient that is accumulated for the next step, in the parameter's shape
    and the format it is kept in, not multiplied by a loss scale; None if there is none. All ranks
    have to call it."""
    engine = engine_of(param)
    return param.grad if engine is None else engine.offload.gradient(param)


@torch.no_grad()
def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace that gradient. Raise StateError if there is none."""
    _needed(param, "safe_set_full_grad")
    if param.grad is None:
        raise StateError(
            "safe_set_full_grad: there is no gradient; gradients are there after backward and "
            "before engine.step()"
        )
    param.grad.copy_(value)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of the master, fp32, on the engine's device; None if frozen or in no engine."""
    engine = engine_of(param)
    if engine is None or not param.requires_grad:
        return None
    return engine.offload.values.read(param, "master").to(engine.device)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the master, and the weight to its rounded value."""
    _needed(param, "safe_set_full_fp32_param").offload.values.write(param, "master", value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of one of the optimizer's states, fp32, on the engine's device (zeros before
    the first step); None for a frozen parameter or one of no engine. Raise StateError for a state
    that the rule does not have."""
    engine = engine_of(param)
    if engine is None or not param.requires_grad:
        return None
    _check_state(engine, optim_state_key)
    return engine.offload.values.read(param, optim_state_key).to(engine.device)


def safe_set_full_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set one of the optimizer's states. Raise StateError for one that the rule does not have."""
    engine = _needed(param, "safe_set_full_optimizer_state")
    _check_state(engine, optim_state_key)
    engine.offload.values.write(param, optim_state_key, value)


def _needed(param: nn.Parameter, what: str) -> EngineModule:
    """Return the open engine of a parameter. Raise StateError if there is none."""
    found = engine_of(param)
    if found is None:
        raise StateError(
            f"{what}: a parameter of shape {tuple(param.shape)} belongs to no engine of "
            "deepspeed.initialize that is open"
        )
    return found


def _check_state(engine: EngineModule, key: str) -> None:
    names = engine.offload.config.optimizer.state_names
    if key not in names:
        raise StateError(
            f"optimizer state {key!r}: {engine.offload.config.optimizer.type} keeps "
            f"{', '.join(names) or 'none'}"
        )


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Return the modules of these classes (or class names). Nothing is marked: a block is gathered
    as one, and groups.blocks names others. Raise ValueError if there is none."""
    names = {each if isinstance(each, str) else each.__name__ for each in leaf_module_classes}
    found = [
        module for module in model.modules()
        if names & {type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}"}
    ]  # fmt: skip
    if raise_if_not_found and not found:
        raise ValueError(f"{type(model).__name__} has no module of {list(leaf_module_classes)}")
    return found


def __getattr__(name: str) -> Any:
    raise left_out("offload.deepspeed.utils", name)
