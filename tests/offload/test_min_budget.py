"""The least host budget that `initialize` accepts trains: all the memory needed was planned for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
import offload.memory.tier_manager
from tests.offload.engine_cases import (
    DEVICE_BUDGET,
    MARKS,
    NVME,
    ON,
    config,
    min_budget,
    plan_for_a_gpu,
    seeded,
)
from tests.offload.engine_states import assert_same_bits
from tests.swap.stream_simulation import World

pytestmark = MARKS

WIDTH, BATCH = 48, 6
AMPLE = {**DEVICE_BUDGET, "host": "64MiB", "nvme": "64MiB"}


def with_passes(folder: Path, passes: int) -> dict[str, Any]:
    return config(
        folder, NVME, precision="fp32", gradient_accumulation_steps=passes,
        groups={"blocks": ["Experts"]}, optimizer={"chunk": 2048, "lr": 1e-2},
    )  # fmt: skip


class Experts(nn.Module):
    """Of four experts those that no token chose get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        chosen = weights.argmax(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            tokens = chosen == index
            if tokens.any():
                y[tokens] = expert(x[tokens]) * weights[tokens, index : index + 1]
        return x + y


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def experts() -> Stack:
    return Stack([Experts() for _ in range(10)])


def train(build: Callable[[], nn.Module], keys: dict[str, Any]) -> dict[str, Tensor]:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[keys["precision"]]
    generator = torch.Generator().manual_seed(3)
    model = seeded(build)
    with offload.initialize(model, keys) as engine:
        for _ in range(3):
            for _ in range(keys.get("gradient_accumulation_steps", 1)):
                x = torch.randn(BATCH, WIDTH, generator=generator).to(ON, dtype)
                model(x).float().square().mean().backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        engine.optimizer.state_dict()
        engine.check_integrity()
        return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("lags", [False, True], ids=["", "on a device whose copies lag"])
def test_experts_without_tokens(
    tmp_path: Path, lags: bool, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their block's gradients are never complete, and give way to those of the other blocks."""
    if lags and ON != "cpu":
        pytest.skip("host memory stands in for the device's")
    keys = with_passes(tmp_path, passes)
    expected = train(experts, {**keys, "budget": AMPLE})
    if lags:
        plan_for_a_gpu(monkeypatch)
        world = World(monkeypatch, eager_model=True)
        monkeypatch.setattr(offload.memory.tier_manager, "DeviceHomes", world.device_homes)
    tight = {**min_budget(experts, keys), **({"device": "1MiB"} if lags else {})}
    assert_same_bits(train(experts, {**keys, "budget": tight}), expected)
    assert not lags or world.delayed > 5
