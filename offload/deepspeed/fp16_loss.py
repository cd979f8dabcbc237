"""Losses of fp16 models whose own `backward` scales them, as `engine.backward(loss)` does.

A hook inside the graph would come too late: terms that are added to the loss, as a penalty on the
weights, would stay unscaled. A loss therefore has its own tensor class, and sums of it have, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from offload.deepspeed.registry import ENGINES
from offload.tiers.errors import StateError, UnsupportedError


class ScalingLoss(torch.Tensor):
    """An unscaled loss with a graph. Its `backward` multiplies it by the loss scale."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.backward:
            return _backward(*args, **(kwargs or {}))
        if func is torch.Tensor.__format__:  # which knows torch's own class only
            return format(plain(args[0]), *args[1:])
        found = super().__torch_function__(func, types, args, kwargs or {})
        return plain(found) if type(found) is cls and not found.requires_grad else found


def plain(loss: Any) -> Any:
    """Return the same tensor, whose `backward` does not scale."""
    return loss.as_subclass(torch.Tensor) if isinstance(loss, ScalingLoss) else loss


def _backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    loss = plain(loss)
    scaling = [engine for engine in list(ENGINES) if engine.scales_losses]
    if not scaling:  # they are closed
        loss.backward(*args, **kwargs)
        return
    scales = {engine.loss_scale() for engine in scaling}
    if len(scales) > 1:
        raise StateError(
            f"loss.backward(): the engines of this program have different loss scales, "
            f"{sorted(scales)}; call engine.scale(loss).backward() for each one's own loss"
        )
    for leaf in _leaves(loss):
        if not any(engine.manages(leaf) for engine in scaling):
            raise UnsupportedError(
                "loss.backward() multiplies the loss with the scale of fp16, and so would multiply "
                f"the gradient of a tensor of shape {tuple(leaf.shape)} that no fp16 engine "
                "trains; call engine.scale(loss).backward(), and divide that gradient by "
                "engine.loss_scale()"
            )
    with contextlib.ExitStack() as scaled:
        for engine in scaling:
            scaled.enter_context(engine.offload.runtime.scaled_backward())
        (loss * scales.pop()).backward(*args, **kwargs)


def _leaves(loss: torch.Tensor) -> Iterator[Any]:
    """Return the tensors that backward gives a gradient to."""
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(inner for inner, _ in node.next_functions)
