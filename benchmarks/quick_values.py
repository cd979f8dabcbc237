"""First values that are there at once, for benchmarks of models with billions of parameters.

Billions of fresh normal values take a CPU minutes, and no speed depends on them: products of random
numbers draw the power of random numbers, whether or not they repeat.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

_PATTERN_NUMEL = (1 << 22) - 3  # odd: neighbouring rows never get the same values
_SEED = 1


def give_quick_values(model: nn.Module, std: float) -> None:
    """Let `model`, on the meta device, be initialised from one block of normal values, repeated;
    norms start at 1. Buffers of transformers' models are initialised as usual."""
    generator = torch.Generator().manual_seed(_SEED)
    pattern = torch.randn(_PATTERN_NUMEL, generator=generator) * std

    def fill(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            if param.ndim == 1:
                param.fill_(1.0)
            else:
                param.zero_()  # the one write that is counted, as an initialiser's
                _repeat(pattern, param.data.view(-1))

    def fill_or(theirs: Any, module: nn.Module) -> None:
        fill(module) if next(module.parameters(recurse=False), None) is not None else theirs(module)

    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters = partial(fill, module)  # type: ignore[assignment]
        if hasattr(module, "_init_weights"):  # transformers': of every module in it
            module._init_weights = partial(fill_or, module._init_weights)  # type: ignore[assignment]


def _repeat(pattern: torch.Tensor, flat: torch.Tensor) -> None:
    for start in range(0, flat.numel(), pattern.numel()):
        part = flat[start : start + pattern.numel()]
        part.copy_(pattern[: part.numel()])
