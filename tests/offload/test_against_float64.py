"""How far norms and weights are from float64's: no farther than plain PyTorch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from tests.offload.engine_cases import HOST, MARKS, NVME, config

pytestmark = MARKS


class Weights(nn.Module):
    """The gradient of each weight is what the forward is given for it."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.weights, given, strict=True)
        return torch.stack([(weight * each).sum() for weight, each in pairs]).sum()


@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_weights_are_no_farther_from_float64s_than_torchs(
    tmp_path: Path, placement: dict[str, str], long: bool
) -> None:
    torch.manual_seed(0)
    start = torch.randn(64, 128) * 0.02
    keys = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    steps = 200 if long else 25

    def gradient(step: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(step)
        return torch.randn(start.shape, generator=draw) * torch.randn(1, generator=draw).exp()

    def plain(dtype: torch.dtype) -> torch.Tensor:
        weight = nn.Parameter(start.to(dtype))
        optimizer = torch.optim.AdamW([weight], **keys)
        for step in range(steps):
            weight.grad = gradient(step).to(dtype)
            optimizer.step()
        return weight.detach().double()

    model = Weights(start.shape)
    with torch.no_grad():
        model.weights[0].copy_(start)
    rule = {"type": "adamw", **keys, "betas": list(keys["betas"])}
    with offload.initialize(model, config(tmp_path, placement, optimizer=rule)) as engine:
        for step in range(steps):
            model([gradient(step)]).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        with engine.gathered(model.weights[0]):
            trained = model.weights[0].detach().double().clone()
    exact, torchs = plain(torch.float64), plain(torch.float32)
    distance = float((torchs - exact).norm())
    assert float((trained - exact).norm()) <= 1.1 * distance
    assert distance < 1e-5 * float(exact.norm())
