"""`FusedLion` and `DeepSpeedCPULion`, with DeepSpeed's defaults."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from offload.tiers.errors import UnsupportedError


class FusedLion(torch.optim.Optimizer):
    """The param groups of Lion and their numbers; the engine's optimizer steps."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0, maximize: bool = False,
    ) -> None:  # fmt: skip
        numbers = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, numbers)

    def step(self, closure: Any = None) -> NoReturn:
        """Raise UnsupportedError."""
        raise UnsupportedError("FusedLion.step(): call engine.step(), which steps for it")


DeepSpeedCPULion = FusedLion
