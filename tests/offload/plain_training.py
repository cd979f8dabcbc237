"""Training with and without the engine, to compare: gradients of the first step bit for bit, the
weights after a few steps to rounding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from tests.offload.engine_cases import DEVICE, HOST, NVME, ON, WIDTH, seeded
from tests.offload.engine_states import assert_same_bits, gradients_of, parameters_of

LR, DECAY = 1e-2, 0.1
Loss = Callable[[Any, Tensor], Tensor]
Build = Callable[[], nn.Module]
MakeEngine = Callable[..., offload.Engine]
PLACEMENTS = {"nvme": NVME, "host": HOST, "device": DEVICE}
EVERYWHERE = [pytest.param(placement, id=name) for name, placement in PLACEMENTS.items()]


def plain_optimizer(model: nn.Module) -> torch.optim.AdamW:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trainable, lr=LR, weight_decay=DECAY)


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(ON)


def trained_plainly(
    build: Build, loss_of: Loss, data: list[Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the first batch, then parameters and buffers after a step for each."""
    model = seeded(build).to(ON)
    optimizer = plain_optimizer(model)
    gradients: dict[str, Tensor] = {}
    for number, batch in enumerate(data):
        loss_of(model, batch).backward()
        if number == 0:
            named = model.named_parameters()
            gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return gradients, dict(model.named_parameters()), dict(model.named_buffers())


def assert_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6
) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        pair = value.cpu(), expected[name].detach().cpu()
        torch.testing.assert_close(*pair, rtol=1e-5, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def check(
    make: MakeEngine,
    build: Build,
    loss_of: Loss,
    data: list[Tensor],
    placement: Any = NVME,
    **keys: Any,
) -> offload.Engine:
    """Train with and without the engine and compare."""
    gradients, expected, buffers = trained_plainly(build, loss_of, data)
    engine = make(seeded(build), placement, **keys)
    for number, batch in enumerate(data):
        loss_of(engine.module, batch).backward()
        if number == 0:
            assert_same_bits(gradients_of(engine), gradients)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert_close(parameters_of(engine), expected)
    assert_close(dict(engine.module.named_buffers()), buffers)
    engine.check_integrity()
    return engine


def tokens_loss(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model.loss(tokens)
    return loss


def square_loss(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def floats(count: int = 3, *shape: int) -> list[Tensor]:
    return [noise(*(shape or (4, WIDTH)), seed=seed) for seed in range(count)]
