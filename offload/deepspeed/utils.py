"""`deepspeed.utils`: gradients, masters and optimizer states of one parameter."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import nn

from offload.deepspeed.engine import engine_of
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


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of the master, fp32, on the engine's device; None if frozen or in no engine."""
    engine = engine_of(param)
    if engine is None or not param.requires_grad:
        return None
    return engine.offload.values.read(param, "master").to(engine.device)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of one of the optimizer's states, fp32, on the engine's device (zeros before
    the first step); None for a frozen parameter or one of no engine. Raise StateError for a state
    that the rule does not have."""
    engine = engine_of(param)
    if engine is None or not param.requires_grad:
        return None
    names = engine.offload.config.optimizer.state_names
    if optim_state_key not in names:
        raise StateError(
            f"optimizer state {optim_state_key!r}: {engine.offload.config.optimizer.type} keeps "
            f"{', '.join(names) or 'none'}"
        )
    return engine.offload.values.read(param, optim_state_key).to(engine.device)
