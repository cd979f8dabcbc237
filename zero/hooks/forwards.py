"""Callables that hooks, checkpoints and micro-batches install in place of a module's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class ReplacedForward:
    """An attribute of a module, called instead of `own`, until `remove`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._overrides = "forward" in vars(module)
        self.own: Callable[..., Any] = module.forward
        module.forward = self

    def remove(self) -> None:
        """The module has the forward again that it had before."""
        if self._overrides:
            self.module.forward = self.own
        else:
            del vars(self.module)["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError
