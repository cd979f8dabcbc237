"""One decision for all gradients of a step, over two small groups in memory and plain SGD."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from offload.kernels.floats import Float, serial
from offload.kernels.rules import SgdScalars
from offload.kernels.variants import Master
from offload.swap.states.state import MemoryState
from offload.swap.states.trace import Trace
from offload.swap.threads.worker import ParallelRunner
from offload.tiers.errors import StateError
from offload.zero.gradients.gradients import GradientAccumulator
from offload.zero.gradients.loss_scale import LossScale
from offload.zero.groups.group import Classes, ParamGroup
from offload.zero.groups.layout import ParamShape, lay_out
from offload.zero.ranks.sharding import Part
from offload.zero.step.optimizer_state import Hyper, OptimizerState
from offload.zero.step.records import RecordFormat
from offload.zero.step.stepper import Stepper, StepRules
from offload.zero.step.update import ExpectedUses, UpdateQueue
from tests.swap.state_conformance import Places, make_places

NUMELS = ((700, 20), (300,))  # of each group's parameters
PLACES = [(group, index) for group, numels in enumerate(NUMELS) for index in range(len(numels))]


class Gated(ParallelRunner):
    """The update's kernels wait while `open` is clear."""

    def __init__(self) -> None:
        super().__init__(1)
        self.open = threading.Event()
        self.open.set()

    def __call__(self, body: Callable[[int, int], None], n: int) -> None:
        assert self.open.wait(60)
        super().__call__(body, n)


class Training:
    """Parameters, gradients and records in memory; the update queue; no model."""

    def __init__(self, places: Places, loss_scale: LossScale | None = None, **rules: Any) -> None:
        self._places = places
        self.lr = 0.5
        self.outside: set[int] = set()  # parameters in no param group, by id
        self.run = Gated()
        expected = ExpectedUses(lambda group: 0.0, lambda group: 0.0)
        self.updates = UpdateQueue(Float.FP32, self.run, 0, (), expected)
        self.states = [self._state(index, numels) for index, numels in enumerate(NUMELS)]
        self.stepper = Stepper(self.states, self.updates, StepRules(**rules), Trace(), loss_scale)
        self.stepper.norms.add_in([[place] for place in PLACES])
        self.stepper.hyper_source = self.hypers_now

    def _memory(self, name: str, nbytes: int) -> MemoryState:
        return self._places.in_memory(name, nbytes)

    def _state(self, index: int, numels: tuple[int, ...]) -> OptimizerState:
        layout = lay_out([ParamShape((f"{index}.{n}",), (m,)) for n, m in enumerate(numels)])
        params = [nn.Parameter(torch.zeros(spec.shape)) for spec in layout.params]
        state = self._memory(f"parameters of {index}", layout.numel * 4)
        state.tensor().zero_()
        group = ParamGroup(
            index, f"group {index}", layout, params, torch.float32, state, torch.device("cpu"),
            lambda kind: Classes(kind, kind, kind),
        )  # fmt: skip
        group.adopt()
        gradients = GradientAccumulator(
            group.name, layout.params, Float.FP32, Float.FP32,
            lambda itemsize: self._memory(f"gradients of {index}", layout.numel * itemsize),
            serial,
        )  # fmt: skip
        format_ = RecordFormat(Master.NONE, states=())
        record = self._memory(f"record of {index}", format_.nbytes(layout.numel))
        return OptimizerState(
            group, gradients, [range(layout.numel)], [record], [format_],
            np.zeros(len(params), np.int64), Part.of(layout, 0),
        )  # fmt: skip

    def hyper(self, param: nn.Parameter) -> Hyper | None:
        if id(param) in self.outside:
            return None
        numbers = (("lr", self.lr), ("momentum", 0.0), ("weight_decay", 0.0))
        return Hyper(SgdScalars, numbers)

    def hypers_now(self) -> Callable[[nn.Parameter], Hyper | None]:
        params = [param for state in self.states for param in state.group.params]
        now = {id(param): self.hyper(param) for param in params}
        return lambda param: now[id(param)]

    def give(self, group: int, index: int, gradient: Tensor) -> None:
        """Backward has made a gradient."""
        state = self.states[group]
        self.stepper.check_arrival(state)
        there = state.gradients.add(index, gradient)
        self.stepper.count_pass(state, index)
        self.stepper.arrived(state, index, more=not there)

    def give_all(self, seed: int = 0, places: list[tuple[int, int]] = PLACES) -> list[Tensor]:
        given = [gradient(group, index, seed) for group, index in places]
        for place, each in zip(places, given, strict=True):
            self.give(*place, each)
        return given

    def step(self) -> Any:
        return self.stepper.step(self.hyper)

    def values(self) -> list[Tensor]:
        """Parameters, when all updates are done."""
        self.updates.settle()
        for state in self.states:
            state.group.gather()
        return [self.states[group].group.params[index].detach().clone() for group, index in PLACES]

    def close(self) -> None:
        self.run.open.set()
        self.updates.settle()
        self.updates.close()


def gradient(group: int, index: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + 10 * group + index)
    return torch.randn(NUMELS[group][index], generator=generator)


Make = Callable[..., Training]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    for places in make_places(tmp_path):
        with ExitStack() as made:
            yield lambda places=places, **how: made.enter_context(closing(Training(places, **how)))


def assert_moved(training: Training, by: list[Tensor]) -> None:
    for found, expected in zip(training.values(), by, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


# ------------------------------------------------------------------ one decision
@pytest.mark.parametrize("limit", [None, 1.0, 1e6])
def test_norm_and_clipping_are_those_of_torch(make: Make, limit: float | None) -> None:
    training = make(clip_grad_norm=limit)
    given = training.give_all()
    params = [nn.Parameter(torch.zeros_like(each)) for each in given]
    for param, each in zip(params, given, strict=True):
        param.grad = each.clone()
    norm = nn.utils.clip_grad_norm_(params, limit or math.inf)
    outcome = training.step()
    assert outcome.gradient_norm == pytest.approx(norm.item(), rel=1e-6)
    assert not outcome.skipped
    for place, each in zip(PLACES, given, strict=True):
        exact = torch.linalg.vector_norm(each.double())
        assert training.stepper.gradient_norm_of([place]) == exact.float()
    for found, param in zip(training.values(), params, strict=True):
        torch.testing.assert_close(found, -0.5 * param.grad, rtol=1e-6, atol=0.0)


def test_a_parameter_without_gradient_or_param_group_is_left_alone(make: Make) -> None:
    training = make()
    training.outside = {id(training.states[1].group.params[0])}
    (given,) = training.give_all(places=[(0, 1)])
    training.give(1, 0, gradient(1, 0))
    training.step()
    assert_moved(training, [torch.zeros(700), -0.5 * given, torch.zeros(300)])
    assert [state.steps.tolist() for state in training.states] == [[0, 1], [0]]


def test_the_loss_scale_is_taken_out_of_norms_and_updates_and_follows_overflows(
    make: Make,
) -> None:
    scale = LossScale(8.0)
    training = make(loss_scale=scale, skip_nonfinite=True)
    for group, index in PLACES:
        training.give(group, index, 8 * gradient(group, index))
    expected = [gradient(group, index) for group, index in PLACES]
    norm = torch.linalg.vector_norm(torch.stack([each.norm() for each in expected]))
    assert training.step().gradient_norm == pytest.approx(norm.item(), rel=1e-6)
    assert_moved(training, [-0.5 * each for each in expected])
    training.stepper.zero_grad()
    training.give(1, 0, torch.full((300,), math.nan))
    assert training.step().skipped
    assert scale.scale == 4.0
    training.stepper.zero_grad()
    training.give(1, 0, 4 * expected[2])
    training.step()
    assert_moved(training, [-0.5 * expected[0], -0.5 * expected[1], -1.0 * expected[2]])


# ------------------------------------------------------------------ what becomes of gradients
def test_gradients_kept_over_a_step_are_used_again_and_cleared_ones_are_not(make: Make) -> None:
    training = make()
    given = training.give_all()
    assert training.stepper.has_unstepped_gradients
    training.step()
    assert not training.stepper.has_unstepped_gradients
    training.step()
    assert_moved(training, [-1.0 * each for each in given])
    training.stepper.zero_grad()
    assert training.step().gradient_norm == 0.0
    assert_moved(training, [-1.0 * each for each in given])


def test_zero_grad_leaves_a_pending_update_what_it_reads(make: Make) -> None:
    training = make()
    given = training.give_all()
    training.run.open.clear()
    training.step()
    training.stepper.zero_grad()
    assert not any(state.group.pending.done() for state in training.states)
    assert all(state.gradients.holds_any for state in training.states)
    training.run.open.set()
    assert_moved(training, [-0.5 * each for each in given])
    assert not any(state.gradients.has_any for state in training.states)


def test_dropping_one_parameters_gradient_keeps_the_others(make: Make) -> None:
    training = make()
    given = training.give_all()
    training.stepper.drop(training.states[0], [0])
    training.step()
    assert_moved(training, [torch.zeros(700), -0.5 * given[1], -0.5 * given[2]])


def test_a_step_with_fewer_passes_than_configured_is_refused_unless_it_is_the_last_of_several(
    make: Make,
) -> None:
    training = make(passes=2)
    training.give_all()
    with pytest.raises(StateError, match=r"gradient_accumulation_steps: 2 .* came after 1"):
        training.step()
    training.give_all(1)
    training.step()
    training.stepper.zero_grad()
    training.give_all(2)
    training.step()  # an epoch may end so
    training.stepper.zero_grad()
    training.give_all(3)
    with pytest.raises(StateError, match="gradient_accumulation_steps: 2"):
        training.step()


# ------------------------------------------------------------------ updates in backward
def test_a_complete_group_is_updated_before_the_step(make: Make) -> None:
    training = make(in_backward=True)
    told: list[list[int]] = []
    training.stepper.on_used_up = lambda groups, why: told.append(list(groups))
    (bias,) = training.give_all(places=[(0, 1)])
    assert training.states[0].group.pending is None
    (last,) = training.give_all(places=[(1, 0)])
    training.states[1].group.pending.wait()
    flat = training.states[1].group.state.tensor().view(torch.float32)
    assert torch.equal(flat[:300], -0.5 * last)
    assert not training.states[0].group.state.tensor().any()
    training.step()
    assert told == [[1]]
    assert_moved(training, [torch.zeros(700), -0.5 * bias, -0.5 * last])
    assert training.states[1].steps.tolist() == [1]
