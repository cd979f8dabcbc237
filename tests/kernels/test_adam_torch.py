"""Thirty steps beside torch.optim, to fp32 rounding."""

from typing import Any

import numpy as np
import pytest
import torch

from offload.kernels.floats import Float
from offload.kernels.rules import AdamScalars
from tests.kernels.adam_cases import adam_step

STEPS = 30
NUMEL = 5000


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.2, 0.5)])
def test_thirty_steps_match_torch(
    optimizer: Any, weight_decay: float, maximize: bool, amsgrad: bool, betas: tuple[float, float]
) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(NUMEL).astype(np.float32)
    exp_avg, exp_avg_sq, largest = (np.zeros(NUMEL, np.float32) for _ in range(3))
    parameter = torch.nn.Parameter(torch.from_numpy(weight.copy()))
    options = {"lr": 1e-2, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay}
    torch_optimizer = optimizer(
        [parameter], **options, maximize=maximize, amsgrad=amsgrad, foreach=False
    )
    for step in range(1, STEPS + 1):
        grad = rng.standard_normal(NUMEL).astype(np.float32)
        parameter.grad = torch.from_numpy(grad)
        torch_optimizer.step()
        scalars = AdamScalars(
            options["lr"], *betas, options["eps"], weight_decay, step,
            decoupled=optimizer is torch.optim.AdamW, maximize=maximize,
        )  # fmt: skip
        adam_step(
            grad, weight, exp_avg, exp_avg_sq, scalars,
            grad_float=Float.FP32, weight_float=Float.FP32,
            max_exp_avg_sq=largest if amsgrad else None,
        )  # fmt: skip
    state = torch_optimizer.state[parameter]
    # Absolute: 1e-6 of a typical value, for the elements that happen to be near zero.
    np.testing.assert_allclose(weight, parameter.detach().numpy(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(exp_avg, state["exp_avg"].numpy(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(exp_avg_sq, state["exp_avg_sq"].numpy(), rtol=1e-6)


def test_grad_scale_unscales_like_a_scaler_does() -> None:
    rng = np.random.default_rng(1)
    grad = rng.standard_normal(NUMEL).astype(np.float32)
    results = []
    for factor in (1.0, 1024.0):
        weight, exp_avg, exp_avg_sq = (np.ones(NUMEL, np.float32) for _ in range(3))
        scalars = AdamScalars(1e-3, 0.9, 0.999, 1e-8, 0.1, step=1, grad_scale=1 / factor)
        scaled = grad * np.float32(factor)
        adam_step(
            scaled, weight, exp_avg, exp_avg_sq, scalars,
            grad_float=Float.FP32, weight_float=Float.FP32,
        )  # fmt: skip
        results.append(weight.tobytes())
    assert results[0] == results[1]
