"""The search for the smallest changes that make something fit."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from offload.tools.memest.estimate.minimal_sets import minimal_sets


def ladder(letter: str, *gains: int) -> list[tuple[str, int]]:
    return [(f"{letter}{index}", gain) for index, gain in enumerate(gains)]


def search(needed: int, *ladders: list[tuple[str, int]], tries: int = 1000) -> list[str]:
    found = minimal_sets(
        ladders, lambda rungs: sum(gain for _, gain in rungs) >= needed, most_tries=tries, enough=99
    )
    return [" ".join(name for name, _ in rungs) for rungs in found]


def test_the_mildest_rung_that_is_enough_is_taken() -> None:
    assert search(5, ladder("a", 1, 4, 6, 9), ladder("b", 2, 3)) == ["a2"]


def test_a_pair_is_as_mild_as_both_allow_and_has_none_that_is_enough_alone() -> None:
    assert search(5, ladder("a", 1, 2, 3), ladder("b", 1, 2, 4), ladder("c", 5)) == ["c0", "a0 b2"]


def test_three_are_found_where_two_are_not_enough() -> None:
    assert search(6, ladder("a", 2), ladder("b", 2), ladder("c", 2)) == ["a0 b0 c0"]
    assert search(7, ladder("a", 2), ladder("b", 2), ladder("c", 2)) == []


def test_no_more_is_tried_than_allowed() -> None:
    asked = []
    ladders = [ladder(letter, 1, 2, 3) for letter in "abcdefgh"]
    minimal_sets(ladders, lambda rungs: asked.append(rungs) is not None, most_tries=7, enough=99)
    assert len(asked) == 7


gains = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(sorted), max_size=4)


@settings(deadline=None)
@given(gains, st.integers(1, 20))
def test_every_set_found_works_and_is_minimal(drawn: list[list[int]], needed: int) -> None:
    ladders = [ladder("abcd"[i], *each) for i, each in enumerate(drawn)]
    for text in search(needed, *ladders):
        chosen = [(ladders["abcd".index(n[0])], int(n[1:])) for n in text.split()]
        total = sum(rungs[index][1] for rungs, index in chosen)
        assert total >= needed
        for rungs, index in chosen:
            assert total - rungs[index][1] < needed
            if index:
                assert total - rungs[index][1] + rungs[index - 1][1] < needed


@settings(deadline=None)
@given(gains, st.integers(1, 20))
def test_a_set_is_found_wherever_up_to_three_changes_help(
    drawn: list[list[int]], needed: int
) -> None:
    ladders = [ladder("abcd"[i], *each) for i, each in enumerate(drawn)]
    possible = any(
        sum(gain for _, gain in rungs) >= needed
        for size in (1, 2, 3)
        for some in combinations(ladders, size)
        for rungs in product(*some)
    )
    assert bool(search(needed, *ladders)) is possible
