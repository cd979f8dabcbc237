"""Parameters as models have them: tied, frozen, without gradients, written to, or none at all.

Most compare with plain PyTorch. Parameters, gradients and optimizer states are on nvme unless a
test says otherwise.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload.errors import UnsupportedError
from tests.offload.engine_cases import (
    MARKS,
    ON,
    WIDTH,
    TinyLM,
    assert_same_bits,
    batches,
    bits,
    differing,
    losses_of,
    parameters_of,
    seeded,
)
from tests.offload.plain_training import (
    EVERYWHERE,
    MakeEngine,
    check,
    floats,
    noise,
    square_loss,
    tokens_loss,
)

pytestmark = MARKS


# ----------------------------------------------------------------------- parameters
@pytest.mark.sample(2)
@pytest.mark.parametrize("placement", EVERYWHERE)
def test_tied_weights_are_one_parameter_with_the_sum_of_both_gradients(
    make: MakeEngine, placement: Any
) -> None:
    engine = check(make, TinyLM, tokens_loss, batches(3), placement)
    model: Any = engine.module
    assert model.head.weight is model.embed.weight
    saved = model.state_dict()
    assert bits(saved["head.weight"]) == bits(saved["embed.weight"])


def test_a_frozen_parameter_stays_as_it_is_and_has_no_optimizer_state(make: MakeEngine) -> None:
    before = {n: p.clone() for n, p in seeded(TinyLM).named_parameters() if not p.requires_grad}
    engine = check(make, TinyLM, tokens_loss, batches(3))
    after = parameters_of(engine)
    assert before
    assert_same_bits({name: after[name] for name in before}, before)
    states = engine.optimizer.state_dict()["state"]
    assert len(states) == sum(p.requires_grad for p in engine.module.parameters())


def test_requiring_a_gradient_of_a_frozen_parameter_later_is_an_error_that_names_it(
    make: MakeEngine,
) -> None:
    engine = make(seeded(TinyLM))
    model: Any = engine.module
    model.blocks[1].gain.requires_grad_()
    tokens_loss(model, batches(1)[0]).backward()
    with pytest.raises(UnsupportedError, match=r"blocks\.1\.gain was frozen"):
        engine.optimizer.step()


def test_freezing_a_parameter_later_stops_its_updates_as_in_torch(make: MakeEngine) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))

    engine = check(make, build, square_loss, floats())
    model: Any = engine.module
    model[0].weight.requires_grad_(False)
    before = parameters_of(engine)
    square_loss(model, noise(4, WIDTH)).backward()
    engine.optimizer.step()
    assert set(differing(before, parameters_of(engine))) == {"0.bias", "2.weight", "2.bias"}


class TwoWays(nn.Module):
    """Uses `left` or `right`."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.way = "left"

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = getattr(self, self.way)(x)
        return y


def test_a_parameter_without_gradient_is_skipped_not_decayed_and_not_counted(
    make: MakeEngine,
) -> None:
    def loss_of(model: Any, x: Tensor) -> Tensor:
        model.way = "right" if x[0, 0] > 0 else "left"
        return square_loss(model, x)

    data = [x.clone() for x in floats(5)]
    for x, sign in zip(data, (-1, -1, 1, -1, 1), strict=True):
        x[0, 0] = sign
    engine = check(make, TwoWays, loss_of, data)
    model: Any = engine.module
    assert engine.values.read_state(model.left.weight)["step"] == 3
    assert engine.values.read_state(model.right.bias)["step"] == 2


def test_buffers_follow_as_without_the_engine(make: MakeEngine) -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)
        )  # fmt: skip

    engine = check(make, build, square_loss, floats(4))
    model: Any = engine.module
    assert model[1].num_batches_tracked == 4
    assert model[1].running_mean.abs().sum() > 0


# ----------------------------------------------------------------------- odd sizes, odd moments


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
