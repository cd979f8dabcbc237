"""The trace: learnt on the first cycle, tolerant of change afterwards."""

from __future__ import annotations

import math
import random
from itertools import islice
from pathlib import Path

import pytest
import torch

import offload.swap.trace
from offload.swap.trace import Trace
from tests.offload.engine_cases import TinyLM, batches, config, losses_of, seeded


def learnt(*uses: int) -> Trace:
    trace = Trace()
    for use in uses:
        trace.use(use)
    trace.end_cycle()
    return trace


def test_the_second_cycle_is_predicted_from_the_first():
    trace = learnt(0, 1, 2, 1, 0)
    seen = []
    for use in (0, 1, 2, 1):
        trace.use(use)
        seen.append(next(trace.upcoming()))
    assert seen == [1, 2, 1, 0]
    assert trace.misses == 0


def test_the_end_of_a_cycle_predicts_the_start_of_the_next():
    trace = learnt(0, 1, 2)
    for use in (0, 1, 2):
        trace.use(use)
    assert list(islice(trace.upcoming(), 2)) == [0, 1]


def test_repeats_in_a_row_count_once():
    trace = learnt(0, 0, 0, 1)
    assert list(trace.upcoming()) == [0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_ahead_is_the_next_uses_each_once_with_its_distance(seed: int):
    chance = random.Random(seed)
    trace = Trace()
    for _ in range(60):
        trace.use(chance.randrange(6))
        if not chance.randrange(12):
            trace.end_cycle()
        count = chance.randrange(8)
        coming = dict.fromkeys(islice(trace.upcoming(), count))
        assert trace.ahead(count) == [(group, trace.next_use(group)) for group in coming]


def test_a_repeat_is_told_beforehand_if_its_use_would_count_nothing():
    trace = learnt(0, 1)
    assert not trace.repeats(1, backward=False)  # a new cycle
    trace.begin_forward()
    trace.use(0)
    trace.use(1)
    assert trace.repeats(1, backward=False)
    assert not trace.repeats(0, backward=False)
    assert not trace.repeats(1, backward=True)  # the first use of a backward pass begins it
    trace.use(1, backward=True)
    assert trace.repeats(1, backward=True)
    trace.end_cycle()
    assert not trace.repeats(1, backward=True)


def test_a_deviation_moves_to_the_nearest_later_match():
    trace = learnt(0, 1, 2, 3, 4)
    trace.use(0)
    trace.use(3)  # 1 and 2 are left out this time
    assert next(trace.upcoming()) == 4
    assert trace.misses == 1


def test_a_changed_stretch_is_what_the_next_cycle_expects():
    trace = learnt(0, 1, 2)
    for use in (0, 2, 1):
        trace.use(use)
    trace.end_cycle()
    assert list(trace.upcoming()) == [0, 2, 1]


def test_an_unknown_use_is_followed_by_what_followed_it_last_time():
    trace = learnt(0, 1, 9, 5, 2)
    for use in (0, 1, 2):  # to the end of the trace
        trace.use(use)
    trace.use(9)  # not expected any more in this cycle
    assert next(trace.upcoming()) == 5


def test_next_use_counts_from_the_cursor_and_wraps_into_the_next_cycle():
    trace = learnt(0, 1, 2, 1)
    trace.use(0)
    trace.use(1)
    assert trace.next_use(2) == 0
    assert trace.next_use(1) == 1
    assert trace.next_use(0) == 2
    assert trace.next_cycle_use(1) == 3
    assert trace.next_use(77) == math.inf


def test_an_empty_cycle_forgets_nothing():
    trace = learnt(0, 1)
    trace.end_cycle()
    assert list(trace.upcoming()) == [0, 1]


def test_first_uses_are_in_the_order_of_this_cycle():
    trace = Trace()
    for use in (2, 0, 2, 1, 0):
        trace.use(use)
    assert trace.first_uses() == [2, 0, 1]


def forward(trace: Trace, *uses: int) -> list[int | None]:
    """What was expected next before each use."""
    trace.begin_forward()
    expected = []
    for use in uses:
        expected.append(next(trace.upcoming(), None))
        trace.use(use)
    return expected


def backward(trace: Trace, *uses: int) -> list[int | None]:
    expected = []
    for use in uses:
        trace.use(use, backward=True)
        expected.append(next(trace.upcoming(), None))
    return expected


def trained() -> Trace:
    trace = Trace()
    forward(trace, 0, 1, 2)
    backward(trace, 2, 1, 0)
    trace.end_cycle()
    return trace


def test_forwards_alone_do_not_add_up():
    trace = Trace()
    for _ in range(1000):
        forward(trace, 0, 1, 2)
    assert len(trace._recorded) == 3
    assert trace.first_uses() == [0, 1, 2]


def test_inference_is_predicted_from_the_forward_before_and_wraps_into_the_next():
    trace = Trace()
    forward(trace, 0, 1, 2)
    for _ in range(3):
        assert forward(trace, 0, 1, 2) == [0, 1, 2]
        assert list(trace.upcoming()) == [0, 1, 2]
    assert trace.misses == 0


@pytest.mark.parametrize("evaluations", [1, 2, 5])
def test_a_training_step_after_evaluations_is_predicted_from_the_step_before_them(evaluations):
    trace = trained()
    for _ in range(3):
        for _ in range(evaluations):
            forward(trace, 0, 1, 2)
        assert forward(trace, 0, 1, 2) == [0, 1, 2]
        assert backward(trace, 2, 1, 0) == [1, 0, 0]
        assert trace.first_uses() == [0, 1, 2]
        trace.end_cycle()
        assert list(trace.upcoming()) == [0, 1, 2, 1, 0]
    assert trace.misses == 0


def test_an_evaluation_between_micro_batches_is_no_part_of_their_cycle():
    trace = Trace()
    for _ in range(2):
        for _ in range(2):
            forward(trace, 0, 1, 2)
            forward(trace, 0, 1, 2)
            backward(trace, 2, 1)
        trace.end_cycle()
    assert list(trace.upcoming()) == [0, 1, 2, 1, 0, 1, 2, 1]


def test_the_backward_after_inference_alone_is_not_predicted():
    trace = Trace()
    forward(trace, 0, 1)
    forward(trace, 0, 1)
    assert backward(trace, 1, 0) == [None, None]
    assert not trace.learnt


def test_a_cycle_without_end_is_ended(monkeypatch):
    """Parts of a model are called, never the whole."""
    monkeypatch.setattr(offload.swap.trace, "LONGEST_CYCLE", 10)
    trace = Trace()
    for _ in range(100):
        trace.use(0)
        trace.use(1)
        assert len(trace._recorded) <= 10
    assert list(islice(trace.upcoming(), 3)) == [0, 1, 0]


def test_an_engine_tells_forwards_alone_from_those_of_a_step(tmp_path: Path) -> None:
    keys = {"groups": {"blocks": ["Block"]}}
    with offload.initialize(seeded(TinyLM), config(tmp_path, **keys)) as engine:
        trace = engine.runtime.trace
        for _ in range(3):
            with torch.no_grad():
                for tokens in batches(4):
                    engine.module.loss(tokens)
            assert len(trace._recorded) == len(set(trace._recorded)) + 1  # the head is tied
            losses_of(engine, batches(1))
            step = list(trace.upcoming())
        losses_of(engine, batches(1))
        assert list(trace.upcoming()) == step
        assert step.count(1) == 2  # forward and backward of one step
