"""`deepspeed.utils`: gradients, masters and optimizer states of one parameter, read and set."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from offload.deepspeed.hints import missing_name
from offload.deepspeed.leaf_modules import (  # noqa: F401 - DeepSpeed has them here
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from offload.deepspeed.registry import engine_of, needed
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
    needed(param, "safe_set_full_grad")
    if param.grad is None:
        raise StateError(
            "safe_set_full_grad: there is no gradient; gradients are there after backward and "
            "before engine.step()"
        )
    param.grad.copy_(value)


def safe_update_full_grad_vectorized(
    param_list: list[nn.Parameter],
    update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor],
) -> None:
    """Replace each gradient by `update_func(gradient, param)`."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of the master, fp32, on the engine's device; None if frozen or in no engine."""
    engine = engine_of(param)
    if engine is None or not param.requires_grad:
        return None
    return engine.offload.values.read(param, "master").to(engine.device)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the master, and the weight to its rounded value."""
    needed(param, "safe_set_full_fp32_param").offload.values.write(param, "master", value)


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
    engine = needed(param, "safe_set_full_optimizer_state")
    _check_state(engine, optim_state_key)
    engine.offload.values.write(param, optim_state_key, value)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part, 1D, of the gradient that `safe_get_full_grad` returns. Parts have
    different sizes, also 0. All ranks have to call it. Raise StateError below stage 3."""
    return _mine(param, "safe_get_local_grad", safe_get_full_grad(param))


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part of the gradient; all ranks replace theirs. Raise StateError as
    `safe_set_full_grad` does, for another size, and below stage 3."""
    safe_set_full_grad(param, _as_mine(param, "safe_set_local_grad", value))


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the master (see `safe_get_local_grad`)."""
    return _mine(param, "safe_get_local_fp32_param", safe_get_full_fp32_param(param))


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the master (see `safe_set_local_grad`)."""
    safe_set_full_fp32_param(param, _as_mine(param, "safe_set_local_fp32_param", value))


def safe_get_local_optimizer_state(
    param: nn.Parameter, optim_state_key: str
) -> torch.Tensor | None:
    """Return this rank's part of one of the optimizer's states (see `safe_get_local_grad`)."""
    full = safe_get_full_optimizer_state(param, optim_state_key)
    return _mine(param, "safe_get_local_optimizer_state", full)


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set this rank's part of one of the optimizer's states (see `safe_set_local_grad`)."""
    whole = _as_mine(param, "safe_set_local_optimizer_state", value)
    safe_set_full_optimizer_state(param, whole, optim_state_key)


def _part_of(param: nn.Parameter, what: str) -> slice:
    engine = needed(param, what)
    if engine.zero_optimization_stage() != 3:
        raise StateError(
            f"{what}: parameters are cut into parts at zero_optimization.stage: 3 alone; call "
            f"{what.replace('local', 'full')}"
        )
    return engine.offload.values.part_of(param)


def _mine(param: nn.Parameter, what: str, whole: torch.Tensor | None) -> torch.Tensor | None:
    return None if whole is None else whole.reshape(-1)[_part_of(param, what)].clone()


def _as_mine(param: nn.Parameter, what: str, value: torch.Tensor) -> torch.Tensor:
    """Return `value` in its place among zeros: a rank takes over its own part alone."""
    part = _part_of(param, what)
    if value.numel() != part.stop - part.start:
        raise StateError(
            f"{what}: this rank's part has {part.stop - part.start} elements, the value "
            f"{value.numel()}"
        )
    whole = value.new_zeros(param.shape)
    whole.view(-1)[part] = value.reshape(-1)
    return whole


def _check_state(engine: Any, key: str) -> None:
    names = engine.offload.config.optimizer.state_names
    if key not in names:
        raise StateError(
            f"optimizer state {key!r}: {engine.offload.config.optimizer.type} keeps "
            f"{', '.join(names) or 'none'}"
        )


class RepeatingLoader:
    """Repeats the batches of a loader without end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def __getattr__(name: str) -> Any:
    raise AttributeError(missing_name("offload.deepspeed.utils", name))
