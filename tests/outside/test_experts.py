"""Packed experts computed expert by expert: the bits of transformers' default, in outputs and all
gradients; what is touched; and what becomes of a model's configuration."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload.errors import UnsupportedError
from tests.outside.expert_cases import Shape, Slices, equal_or_no_tokens, experts, sliced

FAST, ALL = 80, 1500  # drawn cases
WAYS = ("plain", "plain", "autocast", "recomputed", "strided")
ACTS = ("silu", "gelu", "gelu_pytorch_tanh", "relu2")


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Case:
    shape: Shape
    module: nn.Module
    way: str
    hidden: Tensor  # [T, D]
    index: Tensor  # [T, K]
    weights: Tensor  # [T, K]
    gradient: Tensor  # of the output
    input_trained: bool
    weights_trained: bool

    def run(self) -> dict[str, Tensor | None]:
        """The output, and the gradients of the inputs and the packed parameters."""
        hidden, weights = self.hidden.clone(), self.weights.clone()
        if self.way == "strided":
            hidden, weights = hidden.t().contiguous().t(), weights.t().contiguous().t()
        hidden.requires_grad_(self.input_trained)
        weights.requires_grad_(self.weights_trained)
        self.module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.way == "autocast"):
            args = (hidden, self.index, weights)
            if self.way == "recomputed":
                out = checkpoint(self.module, *args, use_reentrant=False)
            else:
                out = self.module(*args)
        if out.requires_grad:
            out.backward(self.gradient)
        packed = {
            name: getattr(self.module, name).grad for name in experts.weight_names(self.module)
        }
        return {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad, **packed}


def draw(seed: int) -> Case:
    choose, g = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = choose.choice([torch.float32, torch.bfloat16])
    step = 16 // dtype.itemsize  # the default refuses rows that are no multiples of 16 bytes
    E, D, inner = choose.choice([1, 2, 3, 8, 17]), choose.randint(1, 12), choose.randint(1, 12)
    gated = choose.random() < 0.7
    shape = Shape(
        E, step * D, step * inner, dtype, is_transposed=choose.random() < 0.4,
        has_bias=choose.random() < 0.5, has_gate=gated, own_gate=gated and choose.random() < 0.5,
        act=choose.choice(ACTS),
    )  # fmt: skip
    module = shape.build(g)
    for param in module.parameters():
        param.requires_grad_(choose.random() < 0.8)
    T, K = choose.choice([0, 1, 2, 5, 33, 64, 200]), choose.randint(1, min(E, 5))
    # Of one expert the default counts pairs of no expert, too.
    limit = E + (choose.random() < 0.3 and E > 1)
    index = torch.randint(
        0, limit if choose.random() < 0.7 else (limit + 1) // 2, (T, K), generator=g
    )
    weights_dtype = dtype if choose.random() < 0.7 else torch.float32
    return Case(
        shape, module, choose.choice(WAYS), torch.randn(T, step * D, generator=g).to(dtype),
        index.to(choose.choice([torch.int64, torch.int32])),
        torch.rand(T, K, generator=g).to(weights_dtype),
        torch.randn(T, step * D, generator=g).to(dtype),
        input_trained=choose.random() < 0.8, weights_trained=choose.random() < 0.8,
    )  # fmt: skip


def differences(case: Case) -> list[str]:
    expected = case.run()
    with sliced([case.module]) as (slices,):
        actual = case.run()
    for name in slices.packed:
        assert actual[name] is None
        actual[name] = slices.gradient(name)
    used = sorted({e for e in case.index.flatten().tolist() if e < case.shape.experts})
    used = used or slices.announced[0]  # without tokens, one stands for all
    assert slices.announced[0] == used == slices.used[: len(used)]
    assert len(used) <= max(1, case.index.numel())
    untouched = set(range(case.shape.experts)) - set(used)
    assert all(leaf.grad is None for e in untouched for leaf in slices.leaves[e].values())
    return [name for name in expected if not equal_or_no_tokens(actual[name], expected[name])]


@pytest.mark.slow
def test_drawn_modules_have_the_bits_of_the_default(long: bool) -> None:
    for seed in range(ALL if long else FAST):
        case = draw(seed)
        assert not differences(case), (seed, case.shape, case.way, differences(case))


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj", None])
def test_frozen_experts_leave_the_gradients_of_the_others(name: str | None) -> None:
    g = torch.Generator().manual_seed(0)
    module = Shape(4, 16, 16).build(g)
    index = torch.randint(4, (32, 2), generator=g)
    hidden, gradient = torch.randn(2, 32, 16, generator=g)
    case = Case(
        Shape(4, 16, 16), module, "plain", hidden, index, index.float(), gradient, True, True
    )
    expected = case.run()
    slices = Slices(module, frozen=lambda expert, each: expert == 1 and name in (None, each))
    experts.attach(module, slices)
    actual = case.run()
    experts.detach(module)
    for each in ("out", "hidden", "weights"):
        assert equal_or_no_tokens(actual[each], expected[each])
    for each in slices.packed:
        for expert, leaf in enumerate(slices.leaves):
            if leaf[each].requires_grad:
                assert equal_or_no_tokens(leaf[each].grad, expected[each][expert])  # type: ignore[index]
            else:
                assert leaf[each].grad is None


def test_a_negative_expert_is_refused() -> None:
    case = draw(6)
    with sliced([case.module]), pytest.raises(UnsupportedError, match="expert -1: experts have"):
        case.module(case.hidden, torch.full_like(case.index, -1), case.weights)
