"""A forward that is computed again routes as the first one did."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.moe import MoE
from tests.offload.engine_cases import HOST, NVME, config, differing, states_of

WIDTH = 16
Layer = Callable[[nn.Module, Tensor], Any]
NOISY: list[dict[str, Any]] = [
    {"k": 1, "capacity_factor": 0.5}, {"k": 2, "capacity_factor": 0.5},
    {"k": 1, "noisy_gate_policy": "RSample"}, {"k": 4, "noisy_gate_policy": "Jitter"},
]  # fmt: skip


def plain(block: nn.Module, x: Tensor) -> Any:
    return block(x)


WAYS: dict[str, Layer] = {
    "plain": plain,
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
}


class Block(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MoE(WIDTH, expert, num_experts=4, min_capacity=0, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output, l_aux, _ = self.moe(self.norm(x))
        return x + output, l_aux


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))


class Model(nn.Module):
    def __init__(self, options: dict[str, Any], way: Layer = plain) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(options) for _ in range(2))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        x, loss = self.first(x), torch.zeros(())
        for block in self.blocks:
            x, l_aux = self.way(block, x)
            loss = loss + 0.01 * l_aux
        return loss + x.square().mean()


def model(options: dict[str, Any], way: Layer = plain) -> Model:
    torch.manual_seed(0)
    return Model(options, way)


def x_of(number: int) -> Tensor:
    return torch.randn(30, WIDTH, generator=torch.Generator().manual_seed(number))


def train(net: Model, order: str) -> list[Any]:
    """Gradients of three steps; in each, two forwards (F) and their backwards (B for the
    older, L for the later one) in this order."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    gradients, number = [], 0
    for _ in range(3):
        losses: list[Tensor] = []
        for action in order:
            if action == "F":
                losses.append(net(x_of(number)))
                number += 1
            else:
                losses.pop(0 if action == "B" else -1).backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return gradients


@pytest.mark.sample(5)
@pytest.mark.parametrize("options", NOISY, ids=str)
@pytest.mark.parametrize("way", [name for name in WAYS if name != "plain"])
@pytest.mark.parametrize("order", ["FBFB", "FFBB", "FFLL"])
def test_checkpoints_route_as_plain_training_does(
    options: dict[str, Any], way: str, order: str
) -> None:
    expected = train(model(options), order)
    actual = train(model(options, WAYS[way]), order)
    for mine, plainly in zip(actual, expected, strict=True):
        for a, b in zip(mine, plainly, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


@pytest.mark.sample(4)
@pytest.mark.parametrize("options", NOISY, ids=str)
def test_an_engine_trains_as_without_recomputation(options: dict[str, Any], tmp_path: Path) -> None:
    def run(name: str, placement: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
        keys = config(tmp_path / name, placement, optimizer={"type": "adamw", "lr": 0.01})
        with offload.initialize(model(options), keys) as engine:
            losses = []
            for number in range(4):
                loss = engine.module(x_of(number))
                loss.backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
                losses.append(loss.item())
            return losses, states_of(engine)

    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    expected = run("a", HOST)
    for name, placement in (("b", HOST), ("c", NVME)):
        actual = run(name, {**placement, "activations": {"tier": "host", "checkpoint": True}})
        assert actual[0] == expected[0]
        assert differing(actual[1], expected[1]) == []


def test_an_engine_is_told_which_experts_come_next(tmp_path: Path) -> None:
    """Tables large enough to move expert by expert."""

    def run(placement: dict[str, Any]) -> tuple[dict[str, Tensor], list[list[str]]]:
        torch.manual_seed(0)
        wide = MoE(WIDTH, lambda: nn.Linear(WIDTH, WIDTH), num_experts=300, k=1, drop_tokens=False)
        told: list[list[str]] = []
        with offload.initialize(wide, config(tmp_path, placement)) as engine:
            store = engine.store
            announce = store.announce
            store.announce = lambda groups: (  # type: ignore[method-assign]
                told.append([group.name for group in groups]) or announce(groups)  # type: ignore[func-returns-value]
            )
            for number in range(2):
                output, l_aux, counts = wide(x_of(number)[:5])
                (output.square().sum() + l_aux).backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
                chosen = counts.nonzero().flatten().tolist()
                assert told[-1] == [f"experts.{number}" for number in chosen]
            states = states_of(engine)
        assert wide.experts.on_chosen is None
        return states, told

    states, told = run(NVME)
    assert len(told) == 2
    assert differing(run(HOST)[0], states) == []
