"""Transforms of torch.func and forward-mode AD through an offloaded model: right, or refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, functional
from torch.utils import _pytree as pytree

import offload
from offload.errors import UnsupportedError
from tests.offload.engine_cases import HOST, MARKS, NVME, ON, config, seeded

pytestmark = MARKS

Model = Callable[[Tensor], Tensor]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Differentiated(nn.Module):
    """Differentiates a layer in its forward, which it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        return torch.func.jvp(lambda z: nn.functional.linear(z, weight), (x,), (x,))[1]


def dual(model: Model, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))


def of_given_parameters(model: Any, x: Tensor) -> Any:
    given = {name: torch.full(p.shape, 0.1, device=ON) for name, p in model.named_parameters()}
    return torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(given)


REFUSED: dict[str, Callable[[Any, Tensor], Any]] = {
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "vjp": lambda model, x: torch.func.vjp(model, x),
    "grad": lambda model, x: torch.func.grad(lambda y: model(y).sum())(x),
    "hessian": lambda model, x: torch.func.hessian(lambda y: model(y).sum())(x),
    "vmap of jacrev": lambda model, x: torch.func.vmap(torch.func.jacrev(model))(x),
    "functional_call": of_given_parameters,
    "dual numbers": dual,
    "jacobian, forward-mode": lambda model, x: functional.jacobian(
        model, x, strategy="forward-mode", vectorize=True
    ),
}
RIGHT: dict[str, Callable[[Any, Tensor], Any]] = {
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "jvp": lambda model, x: functional.jvp(model, x, x),
    "jacobian": lambda model, x: functional.jacobian(model, x),
    "jacobian, vectorized": lambda model, x: functional.jacobian(model, x, vectorize=True),
    "hessian": lambda model, x: functional.hessian(lambda y: model(y).sum(), x),
}


@pytest.fixture(params=[NVME, HOST], ids=["nvme", "host"])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    keys = config(tmp_path, request.param, groups={"blocks": ["Sequential"]})
    with offload.initialize(seeded(Blocks), keys) as engine:
        yield engine.module


def some_input() -> Tensor:
    return torch.linspace(-1, 1, 16, device=ON).reshape(2, 8)


@pytest.mark.parametrize("name", REFUSED)
def test_a_transform_that_handles_cannot_serve_is_refused(model: Any, name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"use backward\(\)"):
        REFUSED[name](model, some_input())
    expected = seeded(Blocks).to(ON)(some_input())
    assert torch.equal(model(some_input()), expected)  # and leaves nothing behind


@pytest.mark.parametrize("name", RIGHT)
def test_what_goes_through_autograds_graph_is_right(model: Any, name: str) -> None:
    plain = seeded(Blocks).to(ON)
    actual, expected = RIGHT[name](model, some_input()), RIGHT[name](plain, some_input())
    pairs = zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_transform_within_a_forward_is_refused(tmp_path: Path) -> None:
    model = Differentiated().requires_grad_(False).to(ON)
    offload.dispatch(model, config(tmp_path, NVME))
    with torch.no_grad(), offload.dispatched(model):
        with pytest.raises(UnsupportedError, match=r"torch\.func"):
            model(some_input())
        assert model.layer(some_input()).isfinite().all()
