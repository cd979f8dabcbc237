"""`optimizer.state` is read as that of torch's AdamW, and a write to it is refused."""

from __future__ import annotations

import io
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import UnsupportedError
from tests.offload.engine_cases import HOST, MARKS, NVME, ON, config, seeded
from tests.offload.engine_states import train_step

pytestmark = MARKS
PLACEMENTS = {"host": HOST, "nvme": NVME}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(ON)


class Pair:
    """The same model with torch's AdamW and with an engine."""

    def __init__(self, folder: Path, placement: str, **optimizer: Any) -> None:
        numbers = {"lr": 1e-2, "weight_decay": 0.1}
        self.plain = seeded(small)
        self.theirs: Any = torch.optim.AdamW(self.plain.parameters(), **numbers)
        settings = {"optimizer": {"type": "adamw", **numbers, **optimizer}}
        self.engine = offload.initialize(
            seeded(small), config(folder, PLACEMENTS[placement], **settings)
        )
        self.optimizer: Any = self.engine.optimizer

    def step(self, count: int = 1) -> None:
        for seed in range(count):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).to(ON)
            for model, optimizer in self.sides:
                train_step(optimizer, model(x).square().sum())

    @property
    def sides(self) -> list[tuple[nn.Module, Any]]:
        return [(self.plain, self.theirs), (self.engine.module, self.optimizer)]

    def both(self, do: Callable[[Any, list[nn.Parameter]], Any]) -> tuple[Any, Any]:
        """The results of `do(optimizer, params)`."""
        expected, actual = (do(o, list(m.parameters())) for m, o in self.sides)
        return expected, actual

    def assert_same(self) -> None:
        for (name, p), q in zip(
            self.plain.named_parameters(), self.engine.module.parameters(), strict=True
        ):
            assert torch.allclose(p, q.detach(), rtol=1e-5, atol=1e-7), name


@pytest.fixture(params=PLACEMENTS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, request.param)
    with made.engine:
        yield made


def assert_alike(actual: Any, expected: Any) -> None:
    """Numbers agree to rounding, everything else is equal."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(actual.clone(), expected, rtol=1e-5, atol=1e-7)
    elif isinstance(expected, dict):
        assert list(map(str, actual)) == list(map(str, expected))
        assert_alike(list(actual.values()), list(expected.values()))
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for mine, other in zip(actual, expected, strict=True):
            assert_alike(mine, other)
    else:
        assert actual == expected


QUESTIONS: dict[str, Callable[[Any, list[nn.Parameter]], Any]] = {
    "bool": lambda o, ps: bool(o.state),
    "len": lambda o, ps: len(o.state),
    "in": lambda o, ps: [p in o.state for p in ps],
    "iteration": lambda o, ps: [p.shape for p in o.state],
    "any": lambda o, ps: any(o.state.values()),
    "keys": lambda o, ps: len(list(o.state.keys())),
    "items": lambda o, ps: [list(s) for _, s in o.state.items()],
    "values": lambda o, ps: [dict(s) for s in o.state.values()],
    "dict": lambda o, ps: [{**s} for s in dict(o.state).values()],
    "get": lambda o, ps: [o.state.get(ps[0], []) == [], o.state.get(None)],
    "copy": lambda o, ps: [s.copy() for s in o.state.values()],
    "len of one": lambda o, ps: len(o.state[ps[0]]),
    "step": lambda o, ps: [s["step"].item() for s in o.state.values() if s],
    "tensors of all": lambda o, ps: sum(
        v.numel() for s in o.state.values() for v in s.values() if isinstance(v, Tensor)
    ),
}


def test_every_question_has_the_answer_of_torch(pair: Pair) -> None:
    for steps in (0, 2):
        pair.step(steps)
        for name, ask in QUESTIONS.items():
            expected, actual = pair.both(ask)
            print(name, "after", steps, "steps")
            assert_alike(actual, expected)


def reset(o: Any, ps: list[nn.Parameter]) -> None:
    states = o.state_dict()
    del states["state"][0]
    states["state"][1]["exp_avg"].fill_(0.5)
    o.load_state_dict(states)


def round_trip(o: Any, ps: list[nn.Parameter]) -> None:
    file = io.BytesIO()
    torch.save(o.state_dict(), file)
    file.seek(0)
    o.load_state_dict(torch.load(file, weights_only=True))


def states_of(o: Any, ps: list[nn.Parameter]) -> dict[int, Any]:
    return {key: state for key, state in sorted(o.state_dict()["state"].items()) if state}


@pytest.mark.parametrize("change", [reset, round_trip])
def test_a_change_of_a_state_dict_has_the_effect_that_it_has_in_torch(
    pair: Pair, change: Any
) -> None:
    pair.step(2)
    pair.both(change)
    expected, actual = pair.both(states_of)
    assert_alike(actual, expected)
    pair.step(2)
    pair.assert_same()


def test_a_tensor_of_a_state_has_the_values_of_the_moment(tmp_path: Path) -> None:
    made = Pair(tmp_path, "host")
    with made.engine:
        made.step(1)
        held = made.optimizer.state[made.optimizer.param_groups[0]["params"][0]]["exp_avg"]
        states = made.optimizer.state_dict()
        states["state"][0]["exp_avg"].fill_(0.5)
        made.optimizer.load_state_dict(states)
        assert held.eq(0.5).all()


Write = Callable[[Any, nn.Parameter], Any]
TO_MAPPINGS: list[Write] = [
    lambda o, p: operator.setitem(o.state[p], "exp_avg", torch.zeros(8, 4)),
    lambda o, p: operator.setitem(o.state[p], "mine", 1),
    lambda o, p: operator.setitem(o.state, p, {}),
    lambda o, p: o.state[p].update(exp_avg=torch.zeros(8, 4)),
    lambda o, p: operator.ior(o.state[p], {"exp_avg": torch.zeros(8, 4)}),
    lambda o, p: o.state.setdefault(p, {}),
    lambda o, p: o.state.pop(p),
    lambda o, p: o.state.popitem(),
    lambda o, p: operator.delitem(o.state, p),
    lambda o, p: operator.delitem(o.state[p], "exp_avg"),
    lambda o, p: o.state[p].clear(),
    lambda o, p: setattr(o, "state", {p: {}}),
]
TO_TENSORS: list[Write] = [
    lambda o, p: o.state[p]["exp_avg"].zero_(),
    lambda o, p: operator.setitem(o.state[p]["exp_avg_sq"], slice(2, 5), 0.25),
    lambda o, p: o.state[p]["exp_avg"].data.view(-1)[:7].mul_(2),
    lambda o, p: setattr(o.state[p]["exp_avg"], "data", torch.zeros(8, 4, device=ON)),
    lambda o, p: o.state[p]["step"].fill_(5),
    lambda o, p: torch._foreach_mul_([o.state[p]["exp_avg"]], 2.0),
    lambda o, p: torch.add(p.detach(), 1, out=o.state[p]["exp_avg"]),
]


def test_a_write_is_refused_and_changes_nothing(pair: Pair) -> None:
    for steps, writes in ((0, TO_MAPPINGS), (1, [*TO_MAPPINGS, *TO_TENSORS])):
        pair.step(steps)
        before = pair.optimizer.state_dict()["state"]
        for number, write in enumerate(writes):
            print("write", number, "after", steps, "steps")
            with pytest.raises((UnsupportedError, TypeError, AttributeError)):
                write(pair.optimizer, pair.optimizer.param_groups[0]["params"][0])
        assert_alike(pair.optimizer.state_dict()["state"], before)


@pytest.mark.parametrize(
    ("look", "error", "fragment"),
    [
        (lambda s: s["exp_avg"].resize_(3), UnsupportedError, "exp_avg of 0.weight"),
        (lambda s: s["exp_avg"].data_ptr(), UnsupportedError, "exp_avg of 0.weight"),
        (lambda s: s["momentum_buffer"], KeyError, "momentum_buffer"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, look: Any, error: type[Exception], fragment: str
) -> None:
    made = Pair(tmp_path, "host")
    with made.engine:
        made.step(1)
        with pytest.raises(error) as caught:
            look(made.optimizer.state[made.optimizer.param_groups[0]["params"][0]])
        assert fragment in str(caught.value)
