"""`deepspeed.checkpointing`: activation checkpointing, by torch's own implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from offload.deepspeed.hints import missing_name

_configured = False


def configure(
    mpu_: Any, deepspeed_config: Any = None, partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None, num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None, synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:  # fmt: skip
    """Do nothing: the engine's configuration says where saved activations live
    (activation_checkpointing.cpu_checkpointing), and the rest has no effect on the result."""
    global _configured
    _configured = True


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _configured


def reset() -> None:
    """Do nothing: no state is kept between steps."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)`, and again in backward with the same random numbers."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def __getattr__(name: str) -> Any:
    raise AttributeError(missing_name("offload.deepspeed.checkpointing", name))
