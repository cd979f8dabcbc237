"""`optimizer.state` reads and writes as that of torch's optimizers do, compared with AdamW."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import StateError, UnsupportedError
from tests.offload.engine_cases import HOST, MARKS, NVME, ON, config, seeded

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
        self.ours: Any = self.engine.optimizer

    def step(self, count: int = 1) -> None:
        for seed in range(count):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).to(ON)
            for model, optimizer in self.sides:
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    @property
    def sides(self) -> list[tuple[nn.Module, Any]]:
        return [(self.plain, self.theirs), (self.engine.module, self.ours)]

    def both(self, do: Callable[[Any, list[nn.Parameter]], Any]) -> tuple[Any, Any]:
        """The results of `do(optimizer, params)`."""
        theirs, ours = (do(o, list(m.parameters())) for m, o in self.sides)
        return theirs, ours

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


def assert_alike(ours: Any, theirs: Any) -> None:
    """Numbers agree to rounding, everything else is equal."""
    if isinstance(theirs, Tensor):
        torch.testing.assert_close(ours.clone(), theirs, rtol=1e-5, atol=1e-7)
    elif isinstance(theirs, dict):
        assert list(map(str, ours)) == list(map(str, theirs))
        assert_alike(list(ours.values()), list(theirs.values()))
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_alike(mine, other)
    else:
        assert ours == theirs


QUESTIONS: dict[str, Callable[[Any, list[nn.Parameter]], Any]] = {
    "bool": lambda o, ps: bool(o.state),
    "len": lambda o, ps: len(o.state),
    "in": lambda o, ps: [p in o.state for p in ps],
    "iteration": lambda o, ps: [p.shape for p in o.state],
    "any": lambda o, ps: any(o.state.values()),
    "keys": lambda o, ps: len(list(o.state.keys())),
    "items": lambda o, ps: [list(s) for _, s in o.state.items()],
    "get": lambda o, ps: o.state.get(ps[0], []) == [],
    "values": lambda o, ps: [dict(s) for s in o.state.values()],
    "dict": lambda o, ps: [{**s} for s in dict(o.state).values()],
    "copy": lambda o, ps: [s.copy() for s in copy.copy(o.state).values()],
    "deepcopy": lambda o, ps: list(copy.deepcopy(o.state).values()),
    "len of one": lambda o, ps: len(o.state[ps[0]]),
    "step": lambda o, ps: [s["step"].item() for s in o.state.values() if s],
    "is a dict": lambda o, ps: (isinstance(o.state, dict), isinstance(o.state[ps[0]], dict)),
    "pop of none": lambda o, ps: (o.state.pop("absent", 7), len(o.state)),
    "setdefault": lambda o, ps: (o.state.setdefault("own", {"a": 1}), o.state.pop("own")),
    "tensors of all": lambda o, ps: sum(
        v.numel() for s in o.state.values() for v in s.values() if isinstance(v, Tensor)
    ),
}


def test_every_question_has_the_answer_of_torch(pair: Pair) -> None:
    for steps in (0, 2):
        pair.step(steps)
        for name, ask in QUESTIONS.items():
            theirs, ours = pair.both(ask)
            print(name, "after", steps, "steps")
            assert_alike(ours, theirs)


def to_device(o: Any, ps: list[nn.Parameter]) -> None:
    """As accelerate's, DeepSpeed's and torchtune's helpers."""
    for state in o.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = value.to(value.device)


def mapped(o: Any, ps: list[nn.Parameter]) -> None:
    """As Lightning's, which makes each state's mapping anew, of the same class."""
    for p, state in o.state.items():
        o.state[p] = type(state)(OrderedDict((k, v.clone()) for k, v in state.items()))


def restarted(o: Any, ps: list[nn.Parameter]) -> None:
    o.state[ps[0]]["exp_avg"].zero_()
    o.state[ps[1]]["exp_avg_sq"][2:5] = 0.25
    o.state[ps[2]]["exp_avg"].data.view(-1)[:7].mul_(2)
    o.state[ps[0]]["step"] -= 1
    o.state[ps[1]]["step"].fill_(5)


def replaced(o: Any, ps: list[nn.Parameter]) -> None:
    stored = copy.deepcopy(o.state[ps[0]])
    stored["exp_avg"] = torch.ones_like(ps[0].detach())
    del o.state[ps[0]]
    o.state[ps[0]] = stored
    o.state[ps[1]] = {**o.state[ps[1]], "exp_avg": torch.full_like(ps[1].detach(), 0.5)}


def popped(o: Any, ps: list[nn.Parameter]) -> None:
    o.state[ps[1]] = o.state.pop(ps[1])


def swapped(o: Any, ps: list[nn.Parameter]) -> None:
    before = {p: copy.deepcopy(state) for p, state in o.state.items()}
    o.state = defaultdict(dict)
    assert not o.state
    o.state = before
    o.state = dict(o.state)


def by_hand(o: Any, ps: list[nn.Parameter]) -> None:
    """As torch's own optimizers begin."""
    o.state.clear()
    for p in ps:
        state = o.state[p]
        if len(state) == 0:
            state["step"] = torch.tensor(3.0)
            state["exp_avg"] = torch.full_like(p.detach(), 0.5)
            state["exp_avg_sq"] = torch.full_like(p.detach(), 0.25)
        assert len(state) == 3
        assert p in o.state


def emptied(o: Any, ps: list[nn.Parameter]) -> None:
    o.state[ps[0]].clear()
    o.state[ps[1]].update(exp_avg=torch.zeros_like(ps[1].detach()))


def round_trip(o: Any, ps: list[nn.Parameter]) -> None:
    file = io.BytesIO()
    torch.save(o.state_dict(), file)
    o.state.clear()
    file.seek(0)
    o.load_state_dict(torch.load(file, weights_only=True))


def states_of(o: Any, ps: list[nn.Parameter]) -> dict[int, Any]:
    return {key: state for key, state in sorted(o.state_dict()["state"].items()) if state}


CHANGES = [to_device, mapped, restarted, replaced, popped, swapped, by_hand, emptied, round_trip]


@pytest.mark.sample(4)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_has_the_effect_that_it_has_in_torch(pair: Pair, change: Any) -> None:
    pair.step(2)
    pair.both(change)
    theirs, ours = pair.both(states_of)
    assert_alike(ours, theirs)
    pair.step(2)
    pair.assert_same()


@pytest.mark.parametrize(
    "change",
    [
        lambda o, p: o.state.clear(),
        lambda o, p: o.state[p].clear(),
        lambda o, p: setattr(o, "state", {}),
        lambda o, p: o.load_state_dict(o.state_dict()),
    ],
)
def test_what_was_taken_before_states_start_over_is_refused(tmp_path: Path, change: Any) -> None:
    made = Pair(tmp_path, "host")
    with made.engine:
        made.step(1)
        param = made.ours.param_groups[0]["params"][0]
        states, held = made.ours.state, made.ours.state[param]["exp_avg"]
        change(made.ours, param)
        with pytest.raises(StateError, match="before its states started over"):
            held.sum()
        if states is not made.ours.state:
            with pytest.raises(StateError, match="before another one took its place"):
                made.ours.state = states


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "error", "fragment"),
    [
        (lambda s, p: s[p].update(exp_avg=torch.zeros(3)), ValueError, "has shape (3,)"),
        (lambda s, p: s[p].update(exp_avg=None), ValueError, "is NoneType"),
        (lambda s, p: s[p].update(step=1.5), ValueError, "no count of steps"),
        (lambda s, p: s[p]["step"].fill_(-1), ValueError, "no count of steps"),
        (lambda s, p: s.update({p: {"exp_avg": torch.zeros(8, 4)}}), ValueError, "lacks step"),
        (lambda s, p: s.update({p: {"momentum_buffer": torch.zeros(8, 4)}}), ValueError, "has mom"),
        (lambda s, p: s[p].pop("exp_avg"), UnsupportedError, "has all of its"),
        (lambda s, p: s[p]["exp_avg"].resize_(3), UnsupportedError, "exp_avg of 0.weight"),
        (lambda s, p: s[p]["exp_avg"].data_ptr(), UnsupportedError, "exp_avg of 0.weight"),
        (lambda s, p: s[p]["momentum_buffer"], KeyError, "momentum_buffer"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(
    tmp_path: Path, change: Any, error: type[Exception], fragment: str
) -> None:
    made = Pair(tmp_path, "host")
    with made.engine:
        made.step(1)
        before = made.ours.state_dict()["state"]
        with pytest.raises(error) as caught:
            change(made.ours.state, made.ours.param_groups[0]["params"][0])
        assert fragment in str(caught.value)
        assert_alike(made.ours.state_dict()["state"], before)
