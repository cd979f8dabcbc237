"""The trace: learnt on the first cycle, tolerant of change afterwards."""

from itertools import islice
from pathlib import Path

import pytest
import torch

import offload.swap.states.trace
from offload.swap.states.trace import Trace
from tests.offload.engine_cases import TinyLM, batches, config, losses_of, seeded


def forward(trace: Trace, *uses: int) -> list[int | None]:
    """What was expected next before each use."""
    trace.begin_forward()
    expected = []
    for use in uses:
        expected.append(next(trace.cursor.upcoming(), None))
        trace.use(use)
    return expected


def backward(trace: Trace, *uses: int) -> list[int | None]:
    expected = []
    for use in uses:
        trace.use(use, backward=True)
        expected.append(next(trace.cursor.upcoming(), None))
    return expected


def trained() -> Trace:
    trace = Trace()
    forward(trace, 0, 1, 2)
    backward(trace, 2, 1, 0)
    trace.end_cycle()
    return trace


def test_inference_is_predicted_from_the_forward_before_and_wraps_into_the_next():
    trace = Trace()
    forward(trace, 0, 1, 2)
    for _ in range(3):
        assert forward(trace, 0, 1, 2) == [0, 1, 2]
        assert list(trace.cursor.upcoming()) == [0, 1, 2]


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
        assert list(trace.cursor.upcoming()) == [0, 1, 2, 1, 0]


def test_an_evaluation_between_passes_is_no_part_of_their_cycle():
    trace = Trace()
    for _ in range(2):
        for _ in range(2):
            forward(trace, 0, 1, 2)
            forward(trace, 0, 1, 2)
            backward(trace, 2, 1)
        trace.end_cycle()
    assert list(trace.cursor.upcoming()) == [0, 1, 2, 1, 0, 1, 2, 1]


def test_a_cycle_without_end_is_ended(monkeypatch):
    """Parts of a model are called, never the whole."""
    monkeypatch.setattr(offload.swap.states.trace, "LONGEST_CYCLE", 10)
    trace = Trace()
    for _ in range(100):
        trace.use(0)
        trace.use(1)
        assert len(trace._cycle.uses) <= 10
    assert list(islice(trace.cursor.upcoming(), 3)) == [0, 1, 0]


def test_an_engine_tells_forwards_alone_from_those_of_a_step(tmp_path: Path) -> None:
    keys = {"groups": {"blocks": ["Block"]}}
    with offload.initialize(seeded(TinyLM), config(tmp_path, **keys)) as engine:
        trace = engine.store.trace
        for _ in range(3):
            with torch.no_grad():
                for tokens in batches(4):
                    engine.module.loss(tokens)
            assert len(trace._cycle.uses) == len(set(trace._cycle.uses)) + 1  # the head is tied
            losses_of(engine, batches(1))
            step = list(trace.cursor.upcoming())
        losses_of(engine, batches(1))
        assert list(trace.cursor.upcoming()) == step
        assert step.count(1) == 2  # forward and backward of one step


# ---------------------------------------------------------------- what a pass chooses
def chosen(trace: Trace, choices: list[int]) -> None:
    """A forward over 0, a table of 10 to 13 and 1."""
    forward(trace, 0)
    trace.announce(choices)
    for use in (*choices, 1):
        trace.use(use)


def with_table() -> Trace:
    """After a step that chose 10 and 11."""
    trace = Trace()
    for item in range(10, 14):
        trace.put_in_table(item, "experts")
    chosen(trace, [10, 11])
    backward(trace, 1, 11, 10, 0)
    trace.end_cycle()
    return trace


def test_what_the_forward_chose_is_needed_by_its_backward_before_the_use_behind_its_table() -> None:
    trace = with_table()
    chosen(trace, [12, 13])
    assert list(trace.cursor.upcoming()) == [0, 0, 1]
    assert [item for item, _ in trace.ahead(3)] == [13, 12, 0]
    trace.use(13, backward=True)
    assert [item for item, _ in trace.ahead(3)] == [12, 0, 1]
    assert trace.is_over(13)
    assert not trace.is_over(12)
    assert 12 in trace.first_uses()
    assert trace.next_use(12) < 0 < trace.next_use(13)


def test_a_table_is_expected_where_the_last_cycle_had_it_and_items_by_how_often_they_are_chosen():
    trace = with_table()
    forward(trace, 0)
    assert trace.next_use(10) == trace.next_use(11) == 0.5
    assert trace.next_use(12) > 1000
    trace.announce([12])
    assert trace.next_use(10) > 3  # in the next cycle
    assert trace.next_cycle_use(10) == trace.cursor.uses_left + 1
