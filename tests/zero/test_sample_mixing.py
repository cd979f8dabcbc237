"""Blocks under micro-batches that mix samples, and what the comparison leaves behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import UnsupportedError
from tests.offload.engine_cases import (
    HOST,
    MARKS,
    NVME,
    ON,
    assert_same_bits,
    config,
    gradients_of,
    seeded,
)

pytestmark = MARKS

WIDTH = 8


class Plain(nn.Module):
    """Treats samples alone; `branch` is what others add."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def branch(self, x: Tensor) -> Tensor | float:
        return 0.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y.tanh() + self.branch(x)


def mixed(x: Tensor) -> Tensor:
    return x.mean(0, keepdim=True).expand_as(x)


class InTraining(Plain):
    def branch(self, x: Tensor) -> Tensor | float:
        return mixed(x) if self.training else 0.0


class InEvaluation(Plain):
    def branch(self, x: Tensor) -> Tensor | float:
        return 0.0 if self.training else mixed(x)


class BySize(Plain):
    """Depends on how many samples there are."""

    def branch(self, x: Tensor) -> Tensor | float:
        return x / len(x) if self.training else 0.0


class Shifted(Plain):
    """Each sample gets the one before it."""

    def branch(self, x: Tensor) -> Tensor:
        return x.detach().roll(-1, 0)


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x


def stack(make: Callable[[], nn.Module]) -> Stack:
    model: Stack = seeded(lambda: Stack(make(), make()))
    return model


def inputs(batch: int = 4) -> Tensor:
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(1)).to(ON)


def settings(
    folder: Path, model: Stack, pieces: int = 2, placement: Any = HOST, **more: Any
) -> Any:
    blocks = {"blocks": [type(model.blocks[0]).__name__]}
    return config(folder, placement, groups=blocks, micro_batches=pieces, **more)


@pytest.mark.parametrize("kind", [InTraining, BySize, Shifted])
def test_mixing_is_noticed(tmp_path: Path, kind: type[Plain]) -> None:
    model = stack(kind)
    placement = {**NVME, "activations": {"checkpoint": kind is InTraining}}
    with (
        offload.initialize(model, settings(tmp_path, model, placement=placement)),
        pytest.raises(UnsupportedError, match=r"blocks\.0 .* mixes samples"),
    ):
        model(inputs())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_each_mode_is_asked_and_the_other_one_works(tmp_path: Path, context: Any) -> None:
    model = stack(InEvaluation)
    with offload.initialize(model, settings(tmp_path, model)):
        model(inputs()).sum().backward()
        model.eval()
        with context(), pytest.raises(UnsupportedError, match="mixes samples"):
            model(inputs())
    model = stack(InTraining)
    with offload.initialize(model, settings(tmp_path, model)):
        model.eval()
        with context():
            model(inputs())
        model.train()
        with pytest.raises(UnsupportedError, match="mixes samples"):
            model(inputs())


class Tracing(Plain):
    """Leaves traces of each call, and draws from every generator."""

    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls = 0
        self.sizes: list[int] = []
        self.own = torch.Generator().manual_seed(3)
        self.rng = np.random.default_rng(4)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls += 1
        self.sizes.append(len(x))
        noise = torch.randn(x.shape, generator=self.own) * random.random() * np.random.rand()
        noise = noise.to(x.device) * float(self.rng.random())
        y: Tensor = self.drop(super().forward(x)) + noise
        return y


def draws() -> list[float]:
    """A number of every generator."""
    numbers = [torch.rand(1).item(), torch.rand(1, device=ON).item()]
    return [*numbers, random.random(), np.random.rand()]


def _seed() -> None:
    torch.manual_seed(7)
    random.seed(8)
    np.random.seed(9)


@pytest.mark.parametrize(
    ("check", "placement"), [(False, NVME), ("selective", HOST)], ids=["kept", "selective"]
)
def test_asking_leaves_no_trace(tmp_path: Path, check: Any, placement: Any) -> None:
    """Equal to blocks that are called piece by piece in plain PyTorch."""
    plain, x = stack(Tracing).to(ON), inputs(8)
    _seed()
    h = plain.entry(x)
    for block in plain.blocks:
        h = torch.cat([block(piece) for piece in h.split(1)])
    h.square().mean().backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    drawn = draws()

    model: Any = stack(Tracing)
    placed = {**placement, "activations": {"checkpoint": check}}
    with offload.initialize(model, settings(tmp_path, model, 8, placed)) as engine:
        _seed()
        y = model(x)
        y.square().mean().backward()
        assert_same_bits(gradients_of(engine), expected)
    assert torch.equal(y, h)
    assert draws() == drawn
    assert_same_bits(dict(model.named_buffers()), dict(plain.named_buffers()))
    for block in model.blocks:
        assert (block.calls, block.count.item(), block.sizes) == (8, 8, [1] * 8)


class Writing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.bias.add_(1)
        return super().forward(x)


def test_a_block_that_writes_to_its_parameters_is_refused_by_name(tmp_path: Path) -> None:
    model = stack(Writing)
    with (
        offload.initialize(model, settings(tmp_path, model)),
        pytest.raises(UnsupportedError, match=r"blocks\.0: .* changes its linear\.bias in place"),
    ):
        model(inputs())
