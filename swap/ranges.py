"""Ranges that `torch.profiler` shows, by name: nothing is done where no profiler looks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any


def profiled(name: str) -> AbstractContextManager[Any]:
    """Around a phase, which is shown as `offload: NAME`."""
    import torch  # memest plans with these modules and without it

    if not torch._C._autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(f"offload: {name}")
