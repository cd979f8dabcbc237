"""The trace: learnt on the first cycle, tolerant of change afterwards."""

from __future__ import annotations

import math
from itertools import islice

from offload.swap.trace import Trace


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
