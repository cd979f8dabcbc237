"""Drawn blocks that keep state, recomputed: bit for bit plain PyTorch.

A block is a list of small layers, most of which change a buffer or an attribute, or draw random
numbers. Compared are losses, gradients, buffers, attributes, and what generators give afterwards.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import offload
from tests.offload.engine_cases import (
    DEVICE,
    HOST,
    MARKS,
    NVME,
    ON,
    assert_same_bits,
    config,
    gradients_of,
)

pytestmark = MARKS

WIDTH, BATCH, DRAWS, LONG_DRAWS = 8, 6, 8, 600


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).tanh_()
        return x + y


class Spectral(Linear):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.linear)


class OldSpectral(Linear):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.spectral_norm(self.linear)


class WeightNorm(Linear):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.linear)


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Average(nn.Module):
    """A running mean, changed in place or assigned; what it subtracts is that of before."""

    mean: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        before = self.mean.clone()
        if self.in_place:
            self.mean.lerp_(x.detach().float().mean(0), 0.1)
        else:
            self.mean = torch.lerp(self.mean, x.detach().float().mean(0), 0.1)
        return x - before


class Schedule(nn.Module):
    """A scale that depends on the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        return x * (1 + 1 / (self.calls + len(self.seen)))


class Carry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.last is None else x + 0.1 * self.last.detach()
        self.last = y.mean(0)
        return y


class Noise(nn.Module):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.own = torch.Generator().manual_seed(3)
        self.rng = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        draw: dict[str, Callable[[], Any]] = {
            "torch": lambda: torch.rand_like(x),
            "own": lambda: torch.rand(x.shape, generator=self.own).to(x.device),
            "python": random.random,
            "numpy": np.random.rand,
            "numpy's own": self.rng.random,
            "dropout": lambda: nn.functional.dropout(torch.ones_like(x), 0.3, self.training),
        }
        return x * (0.5 + draw[self.source]())


LAYERS: list[Callable[[], nn.Module]] = [
    Linear, Linear, Spectral, OldSpectral, WeightNorm, BatchNorm, Schedule, Carry,
    lambda: Average(True), lambda: Average(False),
    *(
        lambda source=source: Noise(source)
        for source in ("torch", "own", "python", "numpy", "numpy's own", "dropout")
    ),
]  # fmt: skip


class Block(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        return x + self.out(y)


class Program(nn.Module):
    """Blocks of one drawn kind, called in a drawn order."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        kinds = draw.choices(LAYERS, k=draw.randint(1, 5))
        self.entry = nn.Linear(WIDTH, WIDTH)
        count = draw.randint(2, 3)
        self.blocks = nn.ModuleList(Block([kind() for kind in kinds]) for _ in range(count))
        self.order = list(range(count))
        if draw.random() < 0.5:
            self.order.append(0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for index in self.order:
            x = self.blocks[index](x)
        return x.float().square().mean()

    def state(self) -> dict[str, Any]:
        values = {}
        for name, module in self.named_modules():
            for key in ("calls", "seen", "last", "training"):
                value = getattr(module, key, None)
                values[f"{name}.{key}"] = value.tolist() if isinstance(value, Tensor) else value
        return values


def in_turn(model: nn.Module, data: list[Tensor]) -> Iterator[Tensor]:
    for x in data:
        loss = model(x)
        loss.backward()
        yield loss


def crossed(model: nn.Module, data: list[Tensor]) -> Iterator[Tensor]:
    losses = [model(x) for x in data]
    for loss in reversed(losses):
        loss.backward()
    yield from losses


def retained(model: nn.Module, data: list[Tensor]) -> Iterator[Tensor]:
    for x in data:
        loss = model(x)
        loss.backward(retain_graph=True)
        loss.backward()
        yield loss


def evaluated(model: nn.Module, data: list[Tensor]) -> Iterator[Tensor]:
    for x in data:
        loss = model(x)
        model.eval()
        with torch.no_grad():
            yield model(x)
        loss.backward()
        model.train()
        yield loss


ORDERS = [in_turn, in_turn, crossed, retained, evaluated]


def run(
    model: Any, order: Callable[[nn.Module, list[Tensor]], Iterator[Tensor]], autocast: bool,
    gradients: Callable[[], dict[str, Tensor]],
) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:  # fmt: skip
    torch.manual_seed(7)
    random.seed(8)
    np.random.seed(9)
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(BATCH, WIDTH, generator=generator).to(ON) for _ in range(3)]
    with torch.autocast(ON, torch.bfloat16, enabled=autocast, cache_enabled=False):
        losses = [loss.item() for loss in order(model, data)]
    losses += [torch.rand(1).item(), torch.rand(1, device=ON).item()]
    losses += [random.random(), np.random.rand()]
    tensors = {**gradients(), **{f"buffer {n}": b.clone() for n, b in model.named_buffers()}}
    return losses, tensors, model.state()


def check(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    order = draw.choice(ORDERS)
    placement = {**draw.choice([DEVICE, HOST, NVME, {**NVME, "gradients": "host"}])}
    tier = draw.choice(["device", "device", "nvme"])
    placement["activations"] = {"tier": tier, "checkpoint": draw.choice([True, "selective", False])}
    autocast = draw.random() < 0.25
    shape = draw.random()

    def build() -> Program:
        torch.manual_seed(seed)
        return Program(random.Random(shape))

    plain = build().to(ON)

    def of_plain() -> dict[str, Tensor]:
        return {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}

    expected_losses, expected, expected_state = run(plain, order, autocast, of_plain)
    model = build()
    keys = config(folder, placement, groups={"blocks": ["Block"]})
    with offload.initialize(model, keys) as engine:
        losses, gradients, state = run(model, order, autocast, lambda: gradients_of(engine))
    assert losses == expected_losses
    assert_same_bits(gradients, expected)
    assert state == expected_state


@pytest.mark.parametrize("seed", range(DRAWS))
def test_a_drawn_block_gives_the_bits_of_plain_pytorch(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed)


def test_many_drawn_blocks_give_the_bits_of_plain_pytorch(tmp_path: Path, long: bool) -> None:
    for seed in range(DRAWS, LONG_DRAWS if long else DRAWS):
        check(tmp_path, seed)
