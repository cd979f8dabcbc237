"""The trace: learnt on the first cycle, tolerant of change afterwards."""

from __future__ import annotations

import math
import random
from itertools import islice
from pathlib import Path

import pytest
import torch

import offload.swap.states.trace
from offload.swap.states.trace import Trace
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


def test_what_was_assumed_is_expected_until_a_pass_has_shown_it():
    trace = Trace()
    trace.assume([0, 1, 1, 2, 3])
    trace.begin_forward()
    seen = []
    for use in (0, 2, 1, 2):  # 1 is left out, and comes after all
        trace.use(use)
        seen.append(next(trace.upcoming(), None))
    assert seen == [1, 3, None, 1]  # by who followed, where it is behind the last match
    trace.begin_forward()
    assert list(trace.upcoming()) == [0, 2, 1, 2]


def test_repeats_in_a_row_count_once():
    trace = learnt(0, 0, 0, 1)
    assert list(trace.upcoming()) == [0, 1]


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
    monkeypatch.setattr(offload.swap.states.trace, "LONGEST_CYCLE", 10)
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


# ---------------------------------------------------------------- what a pass chooses
EXPERTS = 4


def expert(layer: int, number: int) -> int:
    """Layers are the groups 0, 1, 2; these their experts."""
    return 10 * (layer + 1) + number


def sparse(layers: int = 3) -> Trace:
    trace = Trace()
    for layer in range(layers):
        for number in range(EXPERTS):
            trace.put_in_table(expert(layer, number), f"layer {layer}")
    return trace


Chosen = dict[int, list[int]]  # by layer


def sparse_forward(trace: Trace, chosen: Chosen, *, announces: bool = False) -> None:
    trace.begin_forward()
    for layer in chosen:
        trace.use(layer)
        items = [expert(layer, number) for number in chosen[layer]]
        if announces:
            trace.announce(items)
        for item in items:
            trace.use(item)


def sparse_backward(trace: Trace, chosen: Chosen, *, recomputes: bool = False) -> None:
    for layer in reversed(chosen):
        trace.use(layer, backward=True)
        for number in chosen[layer] if recomputes else reversed(chosen[layer]):
            trace.use(expert(layer, number), backward=True)


def sparse_step(trace: Trace, chosen: Chosen, *, recomputes: bool = False) -> None:
    sparse_forward(trace, chosen)
    sparse_backward(trace, chosen, recomputes=recomputes)
    trace.end_cycle()


FIRST: Chosen = {0: [0, 1], 1: [2], 2: [3, 0]}


def choices_ahead(trace: Trace, count: int = 20) -> list[int]:
    return [item for item, _ in trace.ahead(count) if item >= 10]


@pytest.mark.parametrize("seed", range(20))
def test_choices_leave_the_order_of_groups_as_if_they_were_not_there(seed: int):
    """Experts in any order, or none; groups in another order; evaluations; parts called alone."""
    chance = random.Random(seed)
    trace, plain = sparse(), Trace()

    def choose(layer: int, *, backward: bool) -> None:
        for _ in range(chance.randrange(4)):
            trace.use(expert(layer, chance.randrange(EXPERTS)), backward=backward)

    def use(layer: int, *, backward: bool) -> None:
        if not chance.randrange(3):
            choose(layer, backward=backward)
        repeats = chance.randrange(2)
        for _ in range(1 + repeats):
            assert trace.repeats(layer, backward=backward) == plain.repeats(
                layer, backward=backward
            )
            assert trace.use(layer, backward=backward) == plain.use(layer, backward=backward)
            choose(layer, backward=backward)
        assert list(trace.upcoming()) == list(plain.upcoming())
        assert list(trace.rest()) == list(plain.rest())
        assert [each for each in trace.ahead(99) if each[0] < 10] == plain.ahead(99)
        for group in range(4):
            assert trace.next_use(group) == plain.next_use(group)
            assert trace.next_cycle_use(group) == plain.next_cycle_use(group)
            if backward:
                assert trace.is_over(group) == plain.is_over(group)

    for _ in range(40):
        layers = [layer for layer in range(3) if chance.randrange(8)]
        if chance.randrange(5):
            trace.begin_forward()
            plain.begin_forward()
        if not chance.randrange(8):
            chance.shuffle(layers)
        for layer in layers:
            use(layer, backward=False)
        if chance.randrange(3):
            for layer in reversed(layers):
                use(layer, backward=True)
            if chance.randrange(2):
                assert [group for group in trace.first_uses() if group < 10] == plain.first_uses()
                trace.end_cycle()
                plain.end_cycle()
        assert (trace.hits, trace.misses) == (plain.hits, plain.misses)


def test_no_forward_is_guessed_and_its_choices_are_ahead_of_its_backward_in_reverse():
    trace = sparse()
    sparse_step(trace, FIRST)
    chosen: Chosen = {0: [3, 1], 1: [0, 1, 2], 2: [1]}
    trace.begin_forward()
    for layer, numbers in chosen.items():
        trace.use(layer)
        if layer < 2:
            assert not choices_ahead(trace, 1)
        for number in numbers:
            trace.use(expert(layer, number))
    assert choices_ahead(trace) == [31, 22, 21, 20, 11, 13]
    for layer in (2, 1, 0):
        trace.use(layer, backward=True)
        for number in reversed(chosen[layer]):
            item = expert(layer, number)
            assert choices_ahead(trace)[0] == item
            trace.use(item, backward=True)
    assert not choices_ahead(trace)
    trace.end_cycle()
    assert not choices_ahead(trace)


def test_where_blocks_are_computed_again_choices_come_back_in_forward_s_order():
    trace = sparse()
    sparse_step(trace, FIRST, recomputes=True)
    chosen: Chosen = {0: [3, 1], 1: [0, 1, 2], 2: [1]}
    sparse_forward(trace, chosen)
    assert choices_ahead(trace) == [31, 20, 21, 22, 13, 11]
    sparse_backward(trace, chosen)  # and no longer
    trace.end_cycle()
    sparse_forward(trace, chosen)
    assert choices_ahead(trace) == [31, 22, 21, 20, 11, 13]


def test_a_backward_that_leaves_choices_out_ends_what_was_expected_of_its_layer():
    trace = sparse()
    sparse_step(trace, FIRST)
    sparse_forward(trace, FIRST)
    for layer in (2, 1):
        trace.use(layer, backward=True)
    assert choices_ahead(trace) == [22, 11, 10]
    assert trace.is_over(expert(2, 3))
    assert not trace.is_over(expert(1, 2))
    assert trace.is_over(expert(1, 3))  # never chosen
    trace.use(expert(1, 2), backward=True)
    assert trace.is_over(expert(1, 2))


def test_what_backward_needs_is_expected_before_what_a_forward_may_choose():
    trace = sparse()
    for _ in range(3):
        sparse_step(trace, {0: [0, 1], 1: [1, 2], 2: [2, 3]})
    sparse_forward(trace, {0: [0], 1: [1], 2: [2]}, announces=True)
    needed = [trace.next_use(expert(layer, layer)) for layer in (2, 1, 0)]
    assert needed == sorted(needed)
    assert trace.next_use(0) < needed[-1] < trace.next_use(0) + 1  # just behind its layer
    assert trace.next_use(expert(0, 1)) > needed[-1]  # chosen before, not this time
    assert trace.next_use(expert(0, 1)) < trace.next_use(expert(2, 3))  # its layer comes first
    assert trace.next_use(expert(0, 3)) > 1e3  # never chosen


def test_what_is_chosen_more_often_is_expected_sooner():
    trace = sparse()
    for number in range(24):
        sparse_step(trace, {0: [0, *[1] * (number % 2), *[2] * (number % 8 == 0)], 1: [], 2: []})
    uses = [trace.next_use(expert(0, number)) for number in range(EXPERTS)]
    assert uses == sorted(uses)
    assert len(set(uses)) == EXPERTS
    assert uses[0] == pytest.approx(1.5)  # behind the layer's use, and always


def test_what_was_announced_ends_a_layer_s_expectations_of_this_forward():
    for announces in (False, True):
        trace = sparse()
        for _ in range(2):
            sparse_step(trace, {layer: [0, 1, 2, 3] for layer in range(3)})
        trace.begin_forward()
        trace.use(0)
        if announces:
            trace.announce([expert(0, 1)])
        trace.use(expert(0, 1))
        # without an announcement the others may yet come
        assert (trace.next_use(expert(0, 2)) < 1) != announces


def test_the_update_of_what_this_cycle_chose_is_expected_before_that_of_the_rest():
    trace = sparse()
    sparse_step(trace, {layer: [0, 1, 2] for layer in range(3)})
    sparse_step(trace, {layer: [0, 1] for layer in range(3)})
    sparse_forward(trace, {layer: [0] for layer in range(3)})
    updates = [trace.next_cycle_use(expert(0, number)) for number in range(EXPERTS)]
    assert updates == sorted(updates)
    assert updates[0] == trace.next_cycle_use(0) + 1  # its place is behind its layer's first use
