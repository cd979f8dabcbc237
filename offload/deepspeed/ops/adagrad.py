"""`DeepSpeedCPUAdagrad`, with DeepSpeed's defaults."""

from __future__ import annotations

from typing import Any

import torch


def DeepSpeedCPUAdagrad(  # noqa: N802 - as DeepSpeed names it
    model_params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0,
    amsgrad: bool = False, fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:  # fmt: skip
    """torch's Adagrad with DeepSpeed's defaults."""
    return torch.optim.Adagrad(model_params, lr, weight_decay=weight_decay, eps=eps)
