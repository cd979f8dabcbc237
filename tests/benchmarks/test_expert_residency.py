"""Routings replayed over the runtime's fetcher: what is counted, and that knowing all is best."""

from __future__ import annotations

import pytest

from benchmarks.expert_residency import (
    EXPERTS,
    LAYERS,
    ORDERS,
    RECORDS,
    SETTLING,
    Belady,
    Guesses,
    Replay,
    Routings,
    made_routings,
    read_routings,
)

ROUTINGS = made_routings(tokens=16, steps=SETTLING + 4)


@pytest.mark.parametrize("slots", [12, 60])
def test_nobody_fetches_less_than_who_knows_what_comes_and_ours_less_than_the_rest(slots: int):
    found = {order: order(ROUTINGS, slots).run() for order in ORDERS}
    needs = sum(1 for _ in ROUTINGS.needs())
    before = Routings("", True, ROUTINGS.passes[:SETTLING])
    assert {figures.needs for figures in found.values()} == {needs - sum(1 for _ in before.needs())}
    fetches = {order: figures.fetches for order, figures in found.items()}
    assert min(fetches.values()) == fetches[Belady]
    assert sorted(fetches, key=lambda order: fetches[order])[1] is Replay


def test_where_all_fits_each_expert_is_fetched_once():
    replay = Replay(ROUTINGS, LAYERS * EXPERTS)
    replay.run()
    assert replay.fetches == len(set(ROUTINGS.needs()))


def test_what_is_guessed_is_counted_as_right_or_in_vain():
    figures = Replay(ROUTINGS, 60, Guesses("", most=2)).run()
    assert 0 < figures.guessed_right < figures.guessed
    assert figures.late < Replay(ROUTINGS, 60).run().late


def test_the_recorded_routings_are_of_these_layers_and_experts():
    path = RECORDS / "expert-routings.json"
    assert path.stat().st_size < 200_000
    for run in read_routings(path):
        assert len(run.passes) > 2 * SETTLING
        assert {len(chosen) for chosen in run.passes} == {LAYERS}
        assert all(0 <= expert < EXPERTS for _, expert in run.needs())
