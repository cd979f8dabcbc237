"""`FusedAdam` and `DeepSpeedCPUAdam`: torch's AdamW or Adam with DeepSpeed's defaults."""

from __future__ import annotations

from typing import Any

import torch

from offload.tiers.errors import UnsupportedError


def FusedAdam(  # noqa: N802 - as DeepSpeed names it
    params: Any, lr: float = 1e-3, bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, adam_w_mode: bool = True,
    weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
) -> torch.optim.Optimizer:  # fmt: skip
    """Adam or AdamW. Raises UnsupportedError without bias correction."""
    if not bias_correction:
        raise UnsupportedError("Adam with bias_correction=False has no rule here")
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return kind(params, lr, betas, eps, weight_decay, amsgrad)


def DeepSpeedCPUAdam(  # noqa: N802 - as DeepSpeed names it
    model_params: Any, lr: float = 1e-3, bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
    amsgrad: bool = False, adamw_mode: bool = True, fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:  # fmt: skip
    """Adam or AdamW. Raises UnsupportedError without bias correction, and for 16-bit states."""
    if not fp32_optimizer_states:
        raise UnsupportedError(
            'fp32_optimizer_states=False: set {"offload": {"optimizer": {"states": "bf16"}}} '
            "in the configuration"
        )
    return FusedAdam(
        model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad
    )
