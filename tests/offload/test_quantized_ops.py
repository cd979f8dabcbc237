"""A dispatched model computes with quantized weights where it gets few tokens: the same bits from
all tiers, close to those of dequantized values, and no slot for values."""

from __future__ import annotations

import copy
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import UnsupportedError
from offload.kernels.floats import Array
from offload.zero.groups.write_tracker import WriteTracker
from offload.zero.hooks import quantized_ops
from offload.zero.tensors.released import is_released
from tests.offload.engine_cases import VOCABULARY
from tests.offload.engine_states import bits
from tests.offload.storage_cases import FORMATS, WIDTH, adapted, in_precision, round_to
from tests.offload.test_storage import PLACEMENTS, quantized


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each product with quantized weights."""
    counts: list[int] = []
    multiply = quantized_ops.multiply

    def noted(x: Array, *rest: Any) -> None:
        counts.append(len(x))
        multiply(x, *rest)

    monkeypatch.setattr(quantized_ops, "multiply", noted)
    return counts


def tokens(count: int) -> Tensor:
    return torch.arange(count)[None] * 7 % VOCABULARY


def dispatched_and_plain(folder: Path, weights: str) -> tuple[Any, Any]:
    """A model whose quantized weights are on nvme, and a plain one with their values."""
    model = adapted(1).requires_grad_(False)
    plain = copy.deepcopy(model)
    round_to(plain, weights)
    return offload.dispatch(model, quantized(folder, weights, "nvme")), plain


@pytest.mark.parametrize("weights", FORMATS)
def test_few_tokens_give_the_same_bits_from_every_tier(
    weights: str, tmp_path: Path, products: list[int]
) -> None:
    plain = in_precision(adapted().requires_grad_(False), "bf16")
    models = [copy.deepcopy(plain) for _ in PLACEMENTS]
    round_to(plain, weights)
    outputs = []
    for model, placement in zip(models, PLACEMENTS, strict=True):
        offload.dispatch(model, quantized(tmp_path, weights, placement, precision="bf16"))
        with torch.no_grad(), offload.dispatched(model) as owner:
            products.clear()
            outputs.append([bits(model(tokens(count))) for count in (1, 4, 1)])
            assert len(products) == 3 * 3 * 4  # passes, blocks, linear layers of a block
            assert bits(model(tokens(5))) == bits(plain(tokens(5)))  # dequantized, and PyTorch's
            assert len(products) == 3 * 3 * 4
            expected = plain(tokens(4)).float()
            off = (model(tokens(4)).float() - expected).abs().max() / expected.abs().max()
            assert off < 0.03
            owner.check_integrity()
    assert outputs[1:] == outputs[:-1]
    assert outputs[0][0] == outputs[0][2]


def test_what_is_no_product_of_few_tokens_is_dequantized(tmp_path: Path) -> None:
    model, plain = dispatched_and_plain(tmp_path, "int4")
    block, expected = model.layers[0], plain.layers[0]
    seen: list[Tensor] = []

    def look(module: nn.Module, *_: Any) -> None:
        weight = module.down.weight
        seen.append(weight.detach().clone())
        seen.append(weight.t() @ torch.ones(WIDTH))
        seen.append(module.norm.weight.clone())
        seen.append(torch.linalg.vector_norm(weight))

    block.register_forward_pre_hook(look)
    expected.register_forward_pre_hook(look)
    with torch.no_grad(), offload.dispatched(model):
        model(tokens(1))
        plain(tokens(1))
        assert len(seen) == 8
        assert all(torch.equal(*pair) for pair in zip(seen[:4], seen[4:], strict=True))
        assert torch.equal(model.layers[0].down.weight.clone(), plain.layers[0].down.weight)
        assert torch.equal(model(tokens(9)), plain(tokens(9)))


def test_gradients_and_autocast_are_computed_with_dequantized_values(
    tmp_path: Path, products: list[int]
) -> None:
    model, plain = dispatched_and_plain(tmp_path, "int4")
    with offload.dispatched(model):
        gradients = []
        for each in (model, plain):
            x = torch.ones(1, 2, WIDTH, requires_grad=True)
            each.layers[0](x).sum().backward()
            gradients.append(x.grad)
        assert torch.equal(*gradients)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(tokens(2)), plain(tokens(2)))
        assert products == []
        with torch.inference_mode():
            model(tokens(2))
        assert len(products) == 4


def test_an_embedding_dequantizes_the_rows_that_are_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = dispatched_and_plain(tmp_path, "nf4")
    with torch.no_grad(), offload.dispatched(model):
        owner = offload.zero.groups.weight_quantizer.WeightQuantizer

        def refused(*_: Any) -> None:
            raise AssertionError("dequantized as a whole")

        real = owner.dequantize
        monkeypatch.setattr(owner, "dequantize", refused)
        for ids in (tokens(1), tokens(3).view(3, 1), torch.zeros(2, 0, dtype=torch.long)):
            assert torch.equal(model.embed(ids), plain.embed(ids))
        monkeypatch.setattr(owner, "dequantize", real)
        with pytest.raises(IndexError, match="out of range"):
            model.embed(torch.tensor([10**6]))


def test_a_model_that_trains_is_evaluated_with_dequantized_values(
    tmp_path: Path, products: list[int]
) -> None:
    model = adapted(1)
    with offload.initialize(model, quantized(tmp_path, "int4")), torch.no_grad():
        model(tokens(2))
    assert products == []


def test_transforms_within_a_forward_take_dequantized_values_or_are_refused(tmp_path: Path) -> None:
    model, plain = dispatched_and_plain(tmp_path, "int4")
    x = torch.randn(3, 1, 2 * WIDTH)
    outputs: list[Tensor] = []

    def transform(block: nn.Module, *_: Any) -> None:
        weight = block.down.weight
        outputs.append(torch.func.vmap(lambda z: nn.functional.linear(z, weight))(x))

    def differentiate(block: nn.Module, *_: Any) -> None:
        weight = block.down.weight
        torch.func.jvp(lambda z: nn.functional.linear(z, weight), (x[0],), (x[0],))

    with torch.no_grad(), offload.dispatched(model):
        for each in (model, plain):
            handle = each.layers[0].register_forward_pre_hook(transform)
            each(tokens(1))
            handle.remove()
        assert torch.equal(*outputs)
        model.layers[0].register_forward_pre_hook(differentiate)
        with pytest.raises(UnsupportedError, match=r"torch\.func"):
            model(tokens(1))


def test_what_a_forward_writes_is_kept(tmp_path: Path) -> None:
    model, _ = dispatched_and_plain(tmp_path, "int8")
    block = model.layers[0]

    def double(*_: Any) -> None:
        block.norm.weight.mul_(2)
        block.down.bias.add_(1)

    with torch.no_grad(), offload.dispatched(model):
        before = block.norm.weight.clone(), block.down.bias.clone()
        handle = block.register_forward_pre_hook(double)
        model(tokens(1))
        handle.remove()
        model(tokens(1))
        assert torch.equal(block.norm.weight, before[0] * 2)
        assert torch.equal(block.down.bias, before[1] + 1)


def test_an_interrupt_amid_dequantization_leaves_nothing_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = dispatched_and_plain(tmp_path, "int4")
    with torch.no_grad(), offload.dispatched(model) as owner:
        expected = bits(model(tokens(1)))
        find = WriteTracker._find_places

        def interrupted(writes: WriteTracker) -> Any:
            signal.raise_signal(signal.SIGINT)
            return find(writes)

        monkeypatch.setattr(WriteTracker, "_find_places", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(tokens(9))
        monkeypatch.setattr(WriteTracker, "_find_places", find)
        params = [param for group in owner.store.groups for param in group.params]
        assert all(is_released(param) for param in params)
        assert bits(model(tokens(1))) == expected
