"""Thirty steps of each rule beside torch.optim in float64, and Lion beside its paper's formula."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from offload.kernels.cpu.optimizer import optimizer_step
from offload.kernels.floats import Float
from offload.kernels.rules import AdagradScalars, AdamScalars, LionScalars, Scalars, SgdScalars

STEPS = 30
NUMEL = 3000
ScalarsAt = Callable[[int], Scalars]


def adam(optimizer: Any, **options: Any) -> tuple[Any, dict[str, Any], ScalarsAt]:
    known = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1} | options
    decoupled = optimizer is torch.optim.AdamW
    return optimizer, known, lambda step: AdamScalars(
        known["lr"], *known["betas"], known["eps"], known["weight_decay"], step,
        decoupled=decoupled, maximize=options.get("maximize", False),
    )  # fmt: skip


def adagrad(**options: Any) -> tuple[Any, dict[str, Any], ScalarsAt]:
    known = {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0, "lr_decay": 0.0} | options
    return torch.optim.Adagrad, known, lambda step: AdagradScalars(step=step, **known)


def sgd(**options: Any) -> tuple[Any, dict[str, Any], ScalarsAt]:
    known = {"lr": 1e-2, "momentum": 0.0, "weight_decay": 0.0} | options
    return torch.optim.SGD, known, lambda step: SgdScalars(step=step, **known)


CASES = [
    adam(torch.optim.AdamW),
    adam(torch.optim.AdamW, maximize=True, betas=(0.0, 0.5)),
    adam(torch.optim.AdamW, amsgrad=True),
    adam(torch.optim.Adam),
    adam(torch.optim.Adam, amsgrad=True, maximize=True),
    adagrad(),
    adagrad(lr_decay=0.1, weight_decay=0.1),
    adagrad(maximize=True, eps=1e-3, weight_decay=0.1),
    sgd(),
    sgd(weight_decay=0.1, maximize=True),
    sgd(momentum=0.9),
    sgd(momentum=0.9, dampening=0.3, weight_decay=0.1),
    sgd(momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
]


@pytest.mark.parametrize(("optimizer", "options", "scalars_at"), CASES)
def test_thirty_steps_match_torch_in_float64(
    optimizer: Any, options: dict[str, Any], scalars_at: ScalarsAt
) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(NUMEL).astype(np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(weight.astype(np.float64)))
    theirs = optimizer([parameter], **options, foreach=False)
    names = scalars_at(1).kept_for({"momentum": 0.0, **options})
    states = [np.zeros(NUMEL, np.float32) for _ in names]
    for step in range(1, STEPS + 1):
        grad = rng.standard_normal(NUMEL).astype(np.float32)
        parameter.grad = torch.from_numpy(grad.astype(np.float64))
        theirs.step()
        optimizer_step(
            grad, weight, states, scalars_at(step), grad_float=Float.FP32, weight_float=Float.FP32
        )
    state = theirs.state[parameter]
    for name, actual in zip(names, states, strict=True):
        wanted = state["max_exp_avg_sq" if name == "max_exp_avg_sq" else name].numpy()
        np.testing.assert_allclose(actual, wanted, rtol=2e-6, atol=2e-6, err_msg=name)
    wanted = parameter.detach().numpy()
    # Absolute: 2e-6 of a typical value, for the elements that happen to be near zero.
    np.testing.assert_allclose(weight, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_lion_matches_the_formula_of_its_paper(weight_decay: float, maximize: bool) -> None:
    """Chen et al., 2023, Algorithm 2: c = b1 m + (1 - b1) g; w -= lr (sign(c) + wd w)."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal(NUMEL).astype(np.float32)
    momentum = np.zeros(NUMEL, np.float32)
    exact, exact_momentum = weight.astype(np.float64), np.zeros(NUMEL)
    scalars = LionScalars(1e-2, 0.9, 0.99, weight_decay, maximize=maximize)
    for _ in range(STEPS):
        grad = rng.standard_normal(NUMEL).astype(np.float32)
        optimizer_step(
            grad, weight, [momentum], scalars, grad_float=Float.FP32, weight_float=Float.FP32
        )
        wide = -grad.astype(np.float64) if maximize else grad.astype(np.float64)
        direction = np.sign(0.9 * exact_momentum + 0.1 * wide)
        exact -= 1e-2 * (direction + weight_decay * exact)
        exact_momentum = 0.99 * exact_momentum + 0.01 * wide
    np.testing.assert_allclose(weight, exact, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(momentum, exact_momentum, rtol=2e-6, atol=2e-7)
