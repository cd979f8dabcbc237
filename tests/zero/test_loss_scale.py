"""The loss scale of fp16 is that of `torch.amp.GradScaler`, to the bit."""

import math
import random

import pytest
import torch

from offload.zero.gradients.loss_scale import LossScale, has_inverse


class Pair:
    """A `LossScale`, and torch's GradScaler with a parameter whose gradient overflows if asked."""

    def __init__(self, initial: float, interval: int) -> None:
        self.loss_scale = LossScale(initial, interval)
        self._param = torch.nn.Parameter(torch.zeros(1))
        self._optimizer = torch.optim.SGD([self._param], 1.0)
        self._scaler = torch.amp.GradScaler("cpu", initial, growth_interval=interval)
        self._scaler.scale(torch.ones(1))

    @property
    def theirs(self) -> tuple[float, int]:
        return self._scaler.get_scale(), self._scaler.state_dict()["_growth_tracker"]

    def step(self, *, overflow: bool) -> None:
        self._param.grad = torch.full((1,), math.inf if overflow else 0.0)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self.loss_scale.update(overflow=overflow)

    def check(self) -> None:
        assert (self.loss_scale.scale, self.loss_scale.good_steps) == self.theirs


def drawn(seed: int) -> tuple[Pair, list[bool]]:
    """A sequence that begins somewhere between fp32's ends, or at one of them."""
    draw = random.Random(seed)
    exponent = draw.choice([draw.randint(-126, 126), 16, 0, 127, -126])
    initial = 2.0**exponent * draw.choice([1, 1, draw.uniform(1, 1.9)])
    often = draw.choice([0.0, 0.05, 0.3, 0.7])
    pair = Pair(initial, draw.choice([1, 2, 5]))
    return pair, [draw.random() < often for _ in range(40)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(1000 if metafunc.config.getoption("--long") else 40))


def test_drawn_overflows_change_it_as_gradscalers(seed: int) -> None:
    pair, overflows = drawn(seed)
    for overflow in overflows:
        before = pair.loss_scale.scale
        pair.step(overflow=overflow)
        if not has_inverse(pair.theirs[0]):  # it can only fall from here, to 0
            assert pair.loss_scale.scale == before < 2.0**-122
            return
        pair.check()


@pytest.mark.parametrize("overflow", [True, False], ids=["down", "up"])
def test_it_is_gradscalers_from_end_to_end_of_fp32(overflow: bool) -> None:
    pair = Pair(65536.0, 1)
    seen = []
    for _ in range(200):
        pair.step(overflow=overflow)
        if overflow and pair.theirs[0] < 2.0**-127:
            break
        pair.check()
        seen.append(pair.loss_scale.scale)
    assert seen[-1] == (2.0**-127 if overflow else 2.0**127)
    assert len(seen) == (143 if overflow else 200)
    assert has_inverse(pair.loss_scale.scale)
