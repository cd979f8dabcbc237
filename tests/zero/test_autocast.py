"""`torch.autocast` around the model (precision: fp32): the bits of plain PyTorch under autocast."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from tests.offload.engine_cases import (
    MARKS,
    NVME,
    ON,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    gradients_of,
    seeded,
)
from tests.zero.test_changed_weights import PLACEMENTS

pytestmark = MARKS


def autocast(**keys: Any) -> torch.autocast:
    return torch.autocast(ON, torch.bfloat16, **keys)


class Looped(TinyLM):
    """The first block is called again: two uses of one weight, one cast of it."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(self.norm(x))


def forward_alone(model: Any, cached: bool) -> list[Tensor]:
    losses = []
    for tokens in batches(2):
        with autocast(cache_enabled=cached):
            loss = model.loss(tokens)
        loss.backward()
        losses.append(loss.detach())
    return losses


def all_in_one(model: Any, cached: bool) -> list[Tensor]:
    """Two forwards before a backward, and evaluation without gradients, in one region."""
    with autocast(cache_enabled=cached):
        losses = [model.loss(tokens) for tokens in batches(2)]
        torch.stack(losses).sum().backward()
        with torch.no_grad():
            losses.append(model.loss(batches(3)[2]))
    return [loss.detach() for loss in losses]


ORDERS = [forward_alone, all_in_one]


def compare(
    folder: Path, placement: Any, order: Callable[[Any, bool], list[Tensor]], cached: bool,
    build: Callable[[], nn.Module] = TinyLM, reference: Callable[[], nn.Module] = TinyLM,
    **keys: Any,
) -> None:  # fmt: skip
    plain, model = seeded(reference).to(ON), seeded(build)
    expected_losses = order(plain, cached)
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    keys.setdefault("groups", {"blocks": ["Block"]})
    with offload.initialize(model, config(folder, placement, **keys)) as engine:
        losses = order(model, cached)
        assert [loss.item() for loss in losses] == [loss.item() for loss in expected_losses]
        assert_same_bits(gradients_of(engine), expected)


@pytest.mark.sample(3)
@PLACEMENTS
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cached", [True, False])
def test_gradients_are_bit_for_bit_those_of_plain_pytorch(
    tmp_path: Path, placement: Any, order: Any, cached: bool
) -> None:
    compare(tmp_path, placement, order, cached)


@pytest.mark.parametrize("check", [True, "selective"])
@pytest.mark.parametrize("order", ORDERS)
def test_recomputation_changes_nothing(tmp_path: Path, check: Any, order: Any) -> None:
    compare(tmp_path, {**NVME, "activations": {"checkpoint": check}}, order, True)


@pytest.mark.parametrize("check", [False, True])
def test_a_block_called_twice_is_cast_as_in_plain_pytorch(tmp_path: Path, check: bool) -> None:
    placement = {**NVME, "activations": {"checkpoint": check}}
    compare(tmp_path, placement, forward_alone, True, Looped, Looped)


@pytest.mark.sample(3)
@PLACEMENTS
@pytest.mark.parametrize("check", [False, True])
def test_weights_are_cast_anew_in_each_region(tmp_path: Path, placement: Any, check: bool) -> None:
    """Also where one is left open around several steps: what plain PyTorch casts once and keeps."""

    def losses(model: Any, optimizer: Any, around_all: bool) -> list[float]:
        values = []
        with autocast() if around_all else nullcontext():
            for tokens in batches(4):
                with autocast():
                    loss = model.loss(tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                values.append(loss.item())
        return values

    for around_all in (False, True):
        if around_all and check and ON != "cpu":
            continue  # autograd's thread computes again: the end of its region ends all casts
        plain, model = seeded(TinyLM).to(ON), seeded(TinyLM)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
        keys = {"optimizer": {"type": "sgd", "lr": 0.5}}
        placed = {**placement, "activations": {"checkpoint": check}}
        with offload.initialize(model, config(tmp_path, placed, **keys)) as engine:
            actual = losses(model, engine.optimizer, around_all)
            assert actual == pytest.approx(losses(plain, optimizer, around_all), rel=1e-6)
