"""The search for the smallest changes that make something fit."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from offload.tools.memest.estimate.changes import minimal_sets


def knob(letter: str, *gains: int) -> list[tuple[str, int]]:
    return [(f"{letter}{index}", gain) for index, gain in enumerate(gains)]


def search(needed: int, *knobs: list[tuple[str, int]], tries: int = 1000) -> list[str]:
    found = minimal_sets(
        knobs,
        lambda options: sum(gain for _, gain in options) >= needed,
        most_tries=tries,
        enough=99,
    )
    return [" ".join(name for name, _ in options) for options in found]


gains = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(sorted), max_size=4)


@settings(deadline=None)
@given(gains, st.integers(1, 20), st.integers(0, 40))
def test_every_set_found_works_and_is_minimal(
    drawn: list[list[int]], needed: int, tries: int
) -> None:
    """However soon the search ends."""
    knobs = [knob("abcd"[i], *each) for i, each in enumerate(drawn)]
    for text in search(needed, *knobs, tries=tries):
        chosen = [(knobs["abcd".index(n[0])], int(n[1:])) for n in text.split()]
        total = sum(options[index][1] for options, index in chosen)
        assert total >= needed
        for options, index in chosen:
            assert total - options[index][1] < needed
            if index:
                assert total - options[index][1] + options[index - 1][1] < needed


@settings(deadline=None)
@given(gains, st.integers(1, 20))
def test_a_set_is_found_wherever_up_to_three_changes_help(
    drawn: list[list[int]], needed: int
) -> None:
    knobs = [knob("abcd"[i], *each) for i, each in enumerate(drawn)]
    possible = any(
        sum(gain for _, gain in options) >= needed
        for size in (1, 2, 3)
        for some in combinations(knobs, size)
        for options in product(*some)
    )
    assert bool(search(needed, *knobs)) is possible
