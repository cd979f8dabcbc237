"""A context manager that replaces a module's forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Make `module` call `forward` inside. Its own forward is restored afterwards, on the instance
    only if it was there before."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.forward = before
