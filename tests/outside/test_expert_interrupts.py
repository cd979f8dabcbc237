"""A Ctrl-C anywhere in a training loop with experts in groups of their own: the loop goes on with
the bits of one that was never interrupted, also where steps were missed by then."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.zero.groups import module_tree
from tests.offload.engine_cases import HOST, NVME, assert_same_bits, config, seeded
from tests.offload.interrupt_points import (
    Interrupted,
    assert_at_rest,
    at_point,
    counted_points,
    same_losses,
)

pytest.importorskip("transformers")

from tests.outside.routed_model import EXPERTS, HIDDEN, Routed
from tests.outside.test_expert_resume import states_of

# Python drops what is raised in a finaliser, or in a callback of a weak reference
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Model(Routed):
    def loss(self, batch: Tensor) -> Tensor:
        """A batch is one number, which says what goes where."""
        number = int(batch)
        draw, generator = random.Random(number), torch.Generator().manual_seed(number)
        chosen = [torch.tensor([draw.sample(range(EXPERTS), 2)] * 3) for _ in self.layers]
        loss: Tensor = self(torch.randn(3, HIDDEN, generator=generator), chosen).square().mean()
        return loss


@pytest.mark.sample("packed-nvme")
@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "list"])
def test_training_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool, placement: Any, long: bool
) -> None:
    monkeypatch.setattr(module_tree, "SMALL_UNIT_NUMEL", 0)
    monkeypatch.setattr(module_tree, "SMALL_TABLE_NUMEL", 0)
    steps = 150 if long else 8
    data = [torch.tensor([number]) for number in range(steps)]

    def build() -> nn.Module:
        return Model(2, packed=packed)

    with offload.initialize(seeded(build), config(tmp_path, placement)) as engine:
        loop = Interrupted(engine)
        expected = [loop.step(batch) for batch in data]
        states = states_of(engine)
        with counted_points() as step_points:
            loop.step(data[0])
        with counted_points() as look_points:
            look(engine, 0)
    draw = random.Random(f"{packed} {placement}")
    with offload.initialize(seeded(build), config(tmp_path, placement)) as engine:
        loop = Interrupted(engine)
        for number, batch in enumerate(data):
            loop.interrupted_step(batch, at_point(draw.randint(1, step_points())))
            if number % 3 == 1:
                interrupted(engine, lambda engine: look(engine, 1), draw.randint(1, look_points()))
        assert_same_bits(states_of(engine), states)
        engine.check_integrity()
    assert same_losses(loop.losses, expected)


def look(engine: offload.Engine, expert: int) -> None:
    """Whatever needs values, so that steps that were missed are made."""
    experts: Any = engine.module.get_submodule("layers.1.experts")
    param = next(experts.parameters())
    with torch.no_grad():
        param[expert].clone()
        engine.module.loss(torch.tensor([99]))  # type: ignore[operator]
    with engine.gathered(param):
        param.sum()
    engine.settle()


def interrupted(engine: offload.Engine, use: Callable[[offload.Engine], None], point: int) -> None:
    try:
        with at_point(point):
            use(engine)
    except KeyboardInterrupt:
        assert_at_rest(engine)
    assert not engine.runtime.store.in_use()
