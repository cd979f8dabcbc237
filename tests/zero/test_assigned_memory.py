"""`.data` of parameters in tiers set to memory of others: refused, before a use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import UnsupportedError
from tests.offload.engine_cases import MARKS, NVME, ON, config, seeded
from tests.zero.test_changed_weights import PLACEMENTS

pytestmark = MARKS

WIDTH = 4


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a).tanh() @ self.b


def _build() -> Any:
    model = nn.Module()
    model.first, model.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model.pair = Pair()
    model.forward = lambda x: model.pair(model.second(model.first(x).tanh()))  # type: ignore[method-assign]
    return model


def _numbers(count: int) -> Tensor:
    return torch.linspace(-1, 1, count, device=ON)


def _gathered(model: Any) -> None:
    engine = offload.engine_of(model)
    assert engine is not None
    with engine.gathered(model.first.weight, model.second.weight):
        model.second.weight.data = model.first.weight.data


def _swapped(model: Any) -> None:
    model.pair.a.data, model.pair.b.data = model.pair.b.data, model.pair.a.data


def _averaged(model: Any) -> None:
    backup = [param.data.clone() for param in model.parameters()]
    for param, values in zip(model.parameters(), backup, strict=True):
        param.data = values * 0.5
    with torch.no_grad():
        model(_numbers(WIDTH))
    for param, values in zip(model.parameters(), backup, strict=True):
        param.data = values


def _from_one_vector(model: Any) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.5
    nn.utils.vector_to_parameters(vector, model.parameters())


def _set(target: str, source: Callable[[Any], Tensor]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.get_parameter(target).data = source(model)

    return change


SHARED: dict[str, Callable[[Any], None]] = {
    "data": _set("second.weight", lambda m: m.first.weight.data),
    "detached": _set("second.weight", lambda m: m.first.weight.detach()),
    "itself": _set("second.weight", lambda m: m.first.weight),
    "a view": _set("second.weight", lambda m: m.first.weight.data.t()),
    "a row, for its bias": _set("second.bias", lambda m: m.second.weight.data[1]),
    "one group's": _set("pair.a", lambda m: m.pair.b.data),
    "swapped": _swapped, "gathered": _gathered,
}  # fmt: skip
APART: dict[str, Callable[[Any], None]] = {
    "averaged": _averaged, "from one vector": _from_one_vector,
    "its own, transposed": _set("first.weight", lambda m: m.first.weight.data.t()),
}  # fmt: skip


def _used(model: Any, change: Callable[[Any], None]) -> None:
    """Change the model, which is refused there or, if parameters are gathered, at their use."""
    change(model)
    model(_numbers(WIDTH))


def _losses(model: Any, optimizer: Any, change: Callable[[Any], None]) -> list[float]:
    losses = []
    for step in range(3):
        if step == 1:
            change(model)
        loss = model(_numbers(2 * WIDTH).view(2, WIDTH)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.sample(5)
@PLACEMENTS
@pytest.mark.parametrize("way", SHARED)
def test_one_given_the_memory_of_another_is_refused_before_it_is_used(
    tmp_path: Path, placement: Any, way: str
) -> None:
    model = seeded(_build)
    with offload.initialize(model, config(tmp_path, placement)) as engine:
        with pytest.raises(UnsupportedError, match=r"\.data was given memory of"):
            _used(model, SHARED[way])
        for param in model.parameters():
            param.data = param.data.clone()  # the remedy
        _losses(model, engine.optimizer, lambda model: None)


@PLACEMENTS
@pytest.mark.parametrize("way", APART)
def test_memory_that_no_two_parameters_share_is_used_as_in_torch(
    tmp_path: Path, placement: Any, way: str
) -> None:
    plain = seeded(_build).to(ON)
    wanted = _losses(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), APART[way])
    model = seeded(_build)
    settings = config(tmp_path, placement, optimizer={"type": "adamw", "lr": 0.01})
    with offload.initialize(model, settings) as engine:
        assert _losses(model, engine.optimizer, APART[way]) == pytest.approx(wanted, rel=1e-6)


def test_a_parameter_of_a_dispatched_model_given_the_memory_of_one_that_trains_is_refused(
    tmp_path: Path,
) -> None:
    learner, actor = seeded(_build), seeded(_build)
    folders = tmp_path / "learner", tmp_path / "actor"
    for folder in folders:
        folder.mkdir()
    offload.dispatch(actor, config(folders[1], {"parameters": "nvme"}))
    with (
        offload.initialize(learner, config(folders[0], NVME)), offload.dispatched(actor),
        pytest.raises(UnsupportedError, match="was given memory of"),
    ):  # fmt: skip
        actor.first.weight.data = learner.first.weight.data
