"""Steps that were missed, made in one pass: the bits of one step after the other with zeros."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from offload.kernels.cpu.noise import Noise
from offload.kernels.cpu.optimizer import Missed
from offload.kernels.cpu.step_loop import SPAN
from offload.kernels.floats import Array, Runner, serial
from offload.kernels.rules import LionScalars, Scalars, SgdScalars, StateFormat
from offload.kernels.variants import Master
from tests.kernels import reference
from tests.kernels.step_cases import NOISE, RULES, Formats, Stored, calm, wild
from tests.kernels.test_optimizer import OTHER_FORMATS as FORMATS

pytestmark = pytest.mark.sample(4)

NUMEL = SPAN + 300


def later(scalars: Scalars, number: int) -> Missed:
    """The step so many after the first one, at another learning rate."""
    changed: dict[str, Any] = {"lr": 10.0 ** -(2 + number % 3), "grad_scale": 0.5 ** (number % 2)}
    if scalars.counts_steps or isinstance(scalars, SgdScalars):
        changed["step"] = 1 + number
    noise = replace(NOISE, key=(NOISE.key + 7919 * number) & 0xFFFFFFFF, weight_key=31 * number)
    return Missed(replace(scalars, **changed), noise)  # type: ignore[type-var]


def drawn(scalars: Scalars, formats: Formats, numel: int, kind: Any) -> Stored:
    if scalars != RULES["adam"] or formats.states is not StateFormat.FP32:
        return Stored.draw(scalars, formats, numel, kind(numel))
    draw, names = kind(numel), scalars.names_of(3)  # amsgrad
    return Stored.of(formats, names, draw(numel), [np.abs(draw(numel)) for _ in names])


def replay(stored: Stored, grad: Array | None, steps: list[Missed], **run: Runner) -> None:
    *missed, last = steps
    stored.step(grad, last.scalars, last.noise, missed=missed, **run)


def check(
    scalars: Scalars, formats: Formats, kind: Any = calm, run: Runner = serial, numel: int = NUMEL
) -> None:
    """Three missed steps and one with a gradient, and three missed steps alone."""
    steps = [later(scalars, number) for number in range(4)]
    grad = reference.encode(kind(9)(numel), formats.grad)
    zeros = reference.encode(np.zeros(numel, np.float32), formats.grad)
    before = drawn(scalars, formats, numel, kind)
    one_by_one, alone, replayed = before.copy(), before.copy(), before.copy()
    for step in steps[:-1]:
        one_by_one.step(zeros, step.scalars, step.noise)
    replay(alone, None, steps[:-1], run=run)
    alone.assert_same(one_by_one)
    one_by_one.step(grad, steps[-1].scalars, steps[-1].noise)
    replay(replayed, grad, steps, run=run)
    replayed.assert_same(one_by_one)


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_replay_is_one_step_after_the_other(rule: str, formats: Formats, long: bool) -> None:
    if not long and (list(RULES).index(rule) + FORMATS.index(formats)) % 7:
        pytest.skip("each rule in some formats: --long has all")
    check(RULES[rule], formats)
    check(RULES[rule], formats, wild)


@pytest.mark.parametrize("states", StateFormat)
def test_threads_and_lengths_change_nothing(states: StateFormat, threads: Runner) -> None:
    formats = Formats(master=Master.SPLIT, states=states)
    for numel in (0, 1, 17, 257, SPAN - 1, SPAN, 3 * SPAN + 5):
        check(RULES["adamw"], formats, run=threads, numel=numel)


MOMENTUM = SgdScalars(1e-2, 0.9, 0.1, step=3)


@pytest.mark.parametrize(
    "other",
    [
        replace(MOMENTUM, momentum=0.0),
        replace(MOMENTUM, nesterov=True),
        LionScalars(1e-3, 0.9, 0.99, 0.1),
    ],
    ids=["other states", "another flag", "another rule"],
)
def test_a_missed_step_of_another_kind_is_refused(other: Scalars) -> None:
    stored = drawn(MOMENTUM, Formats(), 300, calm)
    with pytest.raises(ValueError, match="missed: expected steps as SgdScalars"):
        replay(stored, None, [Missed(other, NOISE), Missed(MOMENTUM, NOISE)])


def test_a_missed_step_that_rounds_needs_its_noise() -> None:
    formats = Formats(states=StateFormat.BF16)
    stored = drawn(RULES["adamw"], formats, 300, calm)
    steps = [Missed(RULES["adamw"]), Missed(RULES["adamw"], Noise(1, 2))]
    with pytest.raises(ValueError, match="missed: expected the noise of each step"):
        replay(stored, None, steps)
