"""Key/value caches are for generating: a training pass of a transformers model goes without one.

Its configuration asks for a cache by default (`use_cache`), in training, too. There the cache only
keeps every block's keys and values alive, and it cannot be used by a block that is recomputed or
runs over pieces of the batch.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

_log = logging.getLogger("offload")
_ASKED, _GIVEN = "use_cache", "past_key_values"


class WithoutCaches:
    """Turns caches off for one model; arguments about caches in a call are respected."""

    def __init__(self, model: nn.Module) -> None:
        self._said = False
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
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not (module.training and torch.is_grad_enabled() and _wanted(module)):
                return None
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            # past_key_values, even None: a loop that goes on with the cache of the last call
            if given.get(_ASKED) is not None or _GIVEN in given or _ASKED in names[: len(args)]:
                return None
            self._say(module)
            return args, {**kwargs, _ASKED: False}

        return before

    def _say(self, module: nn.Module) -> None:
        if not self._said:
            self._said = True
            _log.warning(
                "%s trains without the key/value cache that its configuration asks for "
                "(use_cache: true): only generating needs one; use_cache=True in a call gives it",
                type(module).__name__,
            )


def _wanted(module: nn.Module) -> bool:
    return bool(getattr(module.config, _ASKED, False))
