"""Blocks that change their buffers or attributes: recomputed, they give what they give without."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.errors import ModifiedError, UnsupportedError
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

pytestmark = [pytest.mark.sample(3), *MARKS]

WIDTH, LARGE = 8, 40_000


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.inner(self.linear(x)).tanh())
        return x + y


class Normed(Plain):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)

    def inner(self, x: Tensor) -> Tensor:
        return self.norm(x)


class InPlace(Plain):
    """A running mean changed in place; `part` is a view of it, known by an attribute."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.part = self.mean[: WIDTH // 2]

    def inner(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean * self.part.sum()


class Large(Plain):
    """A large buffer that changes, and one that does not."""

    table: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(LARGE))
        self.register_buffer("mask", torch.ones(LARGE))

    def inner(self, x: Tensor) -> Tensor:
        self.table[:WIDTH] += x.detach().mean(0)
        return x * self.table[:WIDTH].clone() * self.mask[:WIDTH]


class LargeAndChangedThroughData(Large):
    """As codebooks are learnt: autograd counts no version."""

    def inner(self, x: Tensor) -> Tensor:
        self.mask.data[:WIDTH] += x.detach().mean(0)
        return x * self.mask[:WIDTH].clone()


class Counting(Plain):
    """Numbers, a list and a dict of its own decide what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[float] = []
        self.by_size: dict[int, int] = {}

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.detach().sum().item())
        self.by_size[len(x)] = self.by_size.get(len(x), 0) + 1
        scale = self.calls + len(self.seen) + self.by_size[len(x)]
        return x * scale


class Inner(Normed):
    """Checkpoints a part of itself, which holds a batch norm."""

    def inner(self, x: Tensor) -> Tensor:
        return checkpoint(super().inner, x, use_reentrant=False)


class Twice(Normed):
    def inner(self, x: Tensor) -> Tensor:
        return super().inner(super().inner(x).exp())


# beside those that are drawn in test_block_programs.py
KINDS: dict[str, Callable[[], nn.Module]] = {
    "cumulative batch norm": lambda: Normed(None),
    "spectral norm of the block itself": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "in place": InPlace,
    "large": Large,
    "large, through .data": LargeAndChangedThroughData,
    "counting": Counting,
    "an inner checkpoint": Inner,
    "a batch norm used twice": Twice,
}


class Stack(nn.Module):
    """Blocks, of which the first is called again at the end."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return x.square().mean()


def made(build: Callable[[], nn.Module]) -> Any:
    """A model on the engine's device, with the tensors in its attributes, which `.to` leaves."""
    with torch.device(ON):
        return seeded(build)


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(4, WIDTH, generator=generator).to(ON) for _ in range(count)]


def losses_of(model: nn.Module) -> Iterator[float]:
    for x in batches():
        loss = model(x)
        loss.backward()
        yield loss.item()


def settings(folder: Path, check: Any, placement: Any, blocks: str, **more: Any) -> Any:
    placed = {**placement, "activations": {"checkpoint": check}}
    return config(folder, placed, groups={"blocks": [blocks]}, **more)


def compare(folder: Path, build: Callable[[], nn.Module], check: Any) -> nn.Module:
    plain, model = made(build), made(build)
    expected_losses = list(losses_of(plain))
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    blocks = type(model.blocks[0]).__name__
    with offload.initialize(model, settings(folder, check, NVME, blocks)) as engine:
        losses = list(losses_of(model))
        gradients = {n: g.clone() for n, g in gradients_of(engine).items()}
        engine.check_integrity()
    assert losses == expected_losses
    assert_same_bits(gradients, expected)
    assert_same_bits(dict(model.named_buffers()), dict(plain.named_buffers()))
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", [True, "selective"])
def test_a_recomputed_block_is_as_one_that_is_not(tmp_path: Path, kind: str, check: Any) -> None:
    compare(tmp_path, lambda: Stack(KINDS[kind]), check)


class Renormed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, WIDTH, max_norm=0.5)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.embed(torch.arange(4, device=x.device))


class Learning(Plain):
    """A tensor that requires a gradient and is no parameter, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(WIDTH, requires_grad=True)

    def inner(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5)
        return x + self.scale.detach()


@pytest.mark.parametrize(("kind", "name"), [(Renormed, "embed.weight"), (Learning, "scale")])
def test_what_cannot_be_given_back_is_refused_by_name(
    tmp_path: Path, kind: type[Plain], name: str
) -> None:
    model = made(lambda: Stack(kind))
    with (
        offload.initialize(model, settings(tmp_path, True, NVME, kind.__name__)),
        pytest.raises(UnsupportedError, match=rf"blocks\.0 changes its {name} in place"),
    ):
        model(batches()[0])


def _step(model: Any, engine: offload.Engine) -> None:
    model(batches()[1]).backward()
    engine.optimizer.step()


def _write(model: Any, engine: offload.Engine) -> None:
    with engine.gathered(model.blocks[2].out.weight), torch.no_grad():
        model.blocks[2].out.weight.add_(1)


def _mask(model: Any, engine: offload.Engine) -> None:
    model.blocks[2].mask.mul_(2)


@pytest.mark.parametrize(
    ("change", "what"),
    [(_step, "its parameters, by an optimizer step"), (_write, r"out\.weight"), (_mask, "mask")],
)
def test_a_block_changed_between_forward_and_backward_is_an_error(
    tmp_path: Path, change: Callable[[Any, offload.Engine], None], what: str
) -> None:
    model = made(lambda: Stack(Large))
    with offload.initialize(model, settings(tmp_path, True, HOST, "Large")) as engine:
        loss = model(batches()[0])
        change(model, engine)
        with pytest.raises(ModifiedError, match=rf"blocks\.[02] again .* but {what}"):
            loss.backward()


@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_a_layer_of_an_encoder_is_recomputed(placement: dict[str, Any], tmp_path: Path) -> None:
    """Its forward is replaced twice: it asks of what class its parameters are."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True)
    calls = []
    layer.linear1.register_forward_hook(lambda *_: calls.append(1))
    keys = config(
        tmp_path, {**placement, "activations": {"checkpoint": True}},
        groups={"blocks": ["TransformerEncoderLayer"]},
    )  # fmt: skip
    with offload.initialize(nn.Sequential(layer), keys) as engine:
        engine.module(torch.randn(2, 3, WIDTH, device=ON)).sum().backward()  # type: ignore[operator]
    assert len(calls) == 2
