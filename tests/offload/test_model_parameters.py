"""Buffers, inference, models without anything to train, and what is written in `gathered`."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.offload.engine_cases import MARKS, ON, WIDTH, TinyLM, batches, seeded
from tests.offload.engine_states import differing, losses_of, parameters_of
from tests.offload.plain_training import EVERYWHERE, MakeEngine, check, floats, square_loss

pytestmark = MARKS


def test_buffers_follow_as_without_the_engine(make: MakeEngine) -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)
        )  # fmt: skip

    engine = check(make, build, square_loss, floats(4))
    model: Any = engine.module
    assert model[1].num_batches_tracked == 4
    assert model[1].running_mean.abs().sum() > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("placement", EVERYWHERE)
def test_inference_mode_gives_the_bits_of_no_grad_and_leaves_training_alone(
    make: MakeEngine, placement: Any
) -> None:
    engine = make(seeded(TinyLM), placement)
    losses_of(engine, batches(2))
    tokens = batches(1)[0][:, :-1]
    with torch.inference_mode():
        inferred = engine.module(tokens)
        assert not engine.module.embed.weight.is_inference()
    with torch.no_grad():
        assert torch.equal(inferred, engine.module(tokens))
    losses_of(engine, batches(1))


@pytest.mark.sample(3)
@pytest.mark.parametrize("placement", EVERYWHERE)
@pytest.mark.parametrize("trainable", [False, None])
def test_a_model_without_anything_to_train_can_be_evaluated(
    make: MakeEngine, placement: Any, trainable: bool | None
) -> None:
    plain = nn.ReLU() if trainable is None else seeded(lambda: nn.Linear(WIDTH, 3))
    model = nn.ReLU() if trainable is None else seeded(lambda: nn.Linear(WIDTH, 3))
    engine = make(model.requires_grad_(False), placement)
    x = floats(1)[0]
    assert torch.equal(engine.module(x), plain.to(ON)(x))
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    engine.check_integrity()


@pytest.mark.sample(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", EVERYWHERE)
def test_what_is_written_in_gathered_stays_and_becomes_the_master(
    make: MakeEngine, placement: Any, precision: str
) -> None:
    engine = make(seeded(TinyLM), placement, precision=precision)
    losses_of(engine, batches(2))
    model: Any = engine.module
    before = parameters_of(engine)
    with engine.gathered(model.norm), torch.no_grad():
        model.norm.weight.fill_(1.5)
    after = parameters_of(engine)
    assert differing(before, after) == ["norm.weight"]
    assert (after["norm.weight"] == 1.5).all()
    assert (engine.values.read(model.norm.weight, "master") == 1.5).all()
