"""Recomputation, caches and exclusions: how the engine handles activations besides placing them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from offload.swap.activations.activations import ActivationTier
from offload.zero.groups.parameter_grouping import ParameterGrouping
from offload.zero.recompute.recompute import Holder, Recomputation

if TYPE_CHECKING:
    from offload.config import OffloadConfig

_ASKED, _GIVEN = "use_cache", "past_key_values"


def handle_activations(
    model: nn.Module, grouping: ParameterGrouping, config: OffloadConfig,
    tier: ActivationTier | None, holder: Holder,
) -> Callable[[], None]:  # fmt: skip
    """Let blocks be recomputed, caches be off, inputs and buffers stay put; returns a function that
    undoes this. Must be called before the model's other hooks are installed."""
    undo, checkpoint = ExitStack(), config.placement.activations.checkpoint
    undo.callback(WithoutCaches(model).remove)
    if checkpoint:
        selective = checkpoint == "selective"
        recomputation = Recomputation(grouping.units, holder, selective=selective, keeper=tier)
        undo.callback(recomputation.remove)
    if tier is not None:
        undo.callback(_spare_inputs(model, tier).remove)
    return undo.close


def _spare_inputs(model: nn.Module, tier: ActivationTier) -> Any:
    """Keep the caller's inputs and the model's buffers out of tiers: that would free nothing."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            leaves = [*pytree.tree_leaves((args, kwargs)), *module.buffers()]
            tier.spare(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    return model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


class WithoutCaches:
    """Turns key/value caches off for one model while it trains, unless a call asks for one.

    Its configuration asks for a cache by default (`use_cache`), in training, too. There the cache
    only keeps every block's keys and values alive, and a block that is recomputed cannot use it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._hooks = []
        for module in model.modules():
            if not hasattr(getattr(module, "config", None), _ASKED):
                continue
            names = list(inspect.signature(module.forward).parameters)
            if _ASKED in names:
                before = self._before(names)
                self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))

    def remove(self) -> None:
        """Restore the model."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, names: Sequence[str]) -> Callable[[nn.Module, Any, Any], Any]:
        def before(module: Any, args: Any, kwargs: Any) -> Any:
            if not (module.training and torch.is_grad_enabled() and module.config.use_cache):
                return None
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            # past_key_values, even None: a loop that goes on with the cache of the last call
            if given.get(_ASKED) is not None or _GIVEN in given or _ASKED in names[: len(args)]:
                return None
            return args, {**kwargs, _ASKED: False}

        return before
