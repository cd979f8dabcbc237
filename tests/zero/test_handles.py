"""What is saved for backward and is no parameter: kept or parked, and watched for changes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.zero.hooks.handles import HandleTable


class _Copy:
    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.clone()

    def tensor(self) -> Tensor:
        return self._copy


class CopyKeeper:
    """Parks copies; knows what it gave out and what still lives."""

    def __init__(self) -> None:
        self.parked: list[weakref.ref[_Copy]] = []

    def keep(self, tensor: Tensor) -> _Copy | None:
        if tensor.numel() < 4:
            return None
        copy = _Copy(tensor)
        self.parked.append(weakref.ref(copy))
        return copy

    @property
    def alive(self) -> int:
        return sum(reference() is not None for reference in self.parked)


@pytest.fixture(params=[True, False], ids=["parked", "kept"])
def table(request: pytest.FixtureRequest) -> HandleTable:
    return HandleTable(lambda group: None, CopyKeeper() if request.param else None)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def gradients(table: HandleTable | None, build: Any) -> list[Tensor]:
    x, w = leaf(4, 6), leaf(6, 5)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if table is None:
            out = build(x, w)
        else:
            with table.hooks():
                out = build(x, w)
    return list(torch.autograd.grad(out, [x, w]))


class Squared(torch.autograd.Function):
    """Saves an input, an output and something of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(x, y, y.sqrt())
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, y, root = ctx.saved_tensors
        return gradient * (x + root * x.sign()) * (y == y)


def mixed(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).exp()
    a, b = h[:, 1:3], h[:, 3:]
    h = torch.dropout(a * b.expand(4, 2), 0.5, True)
    return Squared.apply(h).tanh().sum()  # type: ignore[no-untyped-call,no-any-return]


def test_gradients_have_the_bits_they_have_without_hooks(table: HandleTable) -> None:
    for found, expected in zip(gradients(table, mixed), gradients(None, mixed), strict=True):
        assert torch.equal(found, expected)


def test_second_derivatives_have_the_bits_they_have_without_hooks(table: HandleTable) -> None:
    def build(x: Tensor, w: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad((x @ w).tanh().square().sum(), x, create_graph=True)
        return slope.square().sum()

    for found, expected in zip(gradients(table, build), gradients(None, build), strict=True):
        assert torch.equal(found, expected)


def test_backward_twice_over_a_retained_graph_gives_the_same(table: HandleTable) -> None:
    x, w = leaf(4, 6), leaf(6, 5)
    with table.hooks():
        out = (x @ w).exp().sum()
    first = torch.autograd.grad(out, [x, w], retain_graph=True)
    second = torch.autograd.grad(out, [x, w])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("through", ["itself", "a view of it", "what it is a view of", "detach"])
def test_a_change_after_saving_is_an_error_that_names_shape_and_versions(
    table: HandleTable, through: str
) -> None:
    with table.hooks():
        base = (leaf(4, 6) * 1).view(24)
        y = base[4:].exp() if through == "itself" else base[4:].view(4, 5)
        out = y.exp() if through == "itself" else y.square()
    with torch.no_grad():
        {"itself": out, "a view of it": y[0], "what it is a view of": base, "detach": y.detach()}[
            through
        ].add_(1)
    shape = r"\(20,\)" if through == "itself" else r"\(4, 5\)"
    with pytest.raises(RuntimeError, match=rf"inplace operation: .* shape {shape} is at version"):
        out.sum().backward()


def test_a_change_before_saving_is_none(table: HandleTable) -> None:
    x = leaf(4, 6)
    with table.hooks():
        y = x * 2
        y.add_(1)
        out = y.square().sum()
    assert torch.equal(torch.autograd.grad(out, x)[0], 4 * (2 * x.detach() + 1))


def test_a_graph_nobody_runs_backward_takes_what_it_saved_with_it(table: HandleTable) -> None:
    """An output must not be kept by the node that it keeps."""
    with table.hooks():
        h = leaf(4, 6).exp()
        out = h.tanh().sum()
    died = weakref.ref(h)
    del h, out
    assert died() is None
    if isinstance(table._keeper, CopyKeeper):
        assert len(table._keeper.parked) == 2
        assert table._keeper.alive == 0


def test_what_is_parked_is_let_go_of_as_backward_goes(table: HandleTable) -> None:
    keeper = table._keeper
    if not isinstance(keeper, CopyKeeper):
        pytest.skip("nothing is parked")
    alive = []
    x = leaf(4, 6)
    with table.hooks():
        h = x
        for _ in range(5):
            h = h.exp()
            h.register_hook(lambda _: alive.append(keeper.alive))
            h = h * 0.5
    h.sum().backward()
    assert alive == sorted(alive, reverse=True)
    assert alive[0] > alive[-1]
    assert keeper.alive == 0


def test_hooks_around_ours_see_what_we_do_not_take(table: HandleTable) -> None:
    seen: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape)
        return tensor.detach()

    x = leaf(4, 6)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed), table.hooks():
        out = x.exp().sum()
    out.backward()
    assert seen == [torch.Size([4, 6])]
    if isinstance(table._keeper, CopyKeeper):
        assert table._keeper.parked == []
