"""Smallest sets of changes that make something work, found by trying.

A knob is one thing that can be changed, its options from the mildest to the strongest change; a
stronger option never helps less. A set takes one option of each of some knobs. It is minimal if
it works, and neither without one of its options nor with a milder one in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from typing import TypeVar

R = TypeVar("R")
MOST_CHANGES_IN_A_SET = 3


Chosen = tuple[tuple[int, int], ...]  # (knob, option) pairs


def minimal_sets(
    knobs: Sequence[Sequence[R]], works: Callable[[tuple[R, ...]], bool], *, most_tries: int,
    enough: int,
) -> list[tuple[R, ...]]:  # fmt: skip
    """Return minimal sets of one change, then of two, then of three; larger ones only while fewer
    than `enough` are known. Deterministic; earlier knobs are tried first."""
    answers: dict[Chosen, bool] = {}

    def try_set(chosen: Chosen) -> bool:
        if chosen not in answers:
            if len(answers) == most_tries:
                raise _EnoughTriedError
            answers[chosen] = works(tuple(knobs[i][r] for i, r in chosen))
        return answers[chosen]

    found: list[Chosen] = []
    with suppress(_EnoughTriedError):  # sets not known to be minimal are left out
        _search(knobs, try_set, found, enough)
    return [tuple(knobs[i][r] for i, r in chosen) for chosen in found]


class _EnoughTriedError(Exception):
    """Ends a search that has tried enough."""


def _search(
    knobs: Sequence[Sequence[R]], try_set: Callable[[Chosen], bool], found: list[Chosen],
    enough: int,
) -> None:  # fmt: skip
    for size in range(1, MOST_CHANGES_IN_A_SET + 1):
        if len(found) >= enough:
            break
        helpful = {knob for chosen in found for knob, _ in chosen}
        alone = {chosen[0][0] for chosen in found if len(chosen) == 1}
        for indices in _sets_of(size, knobs, alone, helpful):
            chosen = _mildest(try_set, knobs, indices)
            if chosen is not None:
                found.append(chosen)
            if size > 1 and len(found) >= enough:
                break


def _sets_of(
    size: int, knobs: Sequence[Sequence[R]], alone: set[int], used: set[int]
) -> Iterator[tuple[int, ...]]:
    """Yield sets of knobs, none of which is enough alone, and no part of which is known to be."""
    usable = [i for i, knob in enumerate(knobs) if knob and i not in alone]
    for indices in combinations(usable, size):
        if size < 3 or not used.issuperset(indices):
            yield indices


def _mildest(
    try_set: Callable[[Chosen], bool], knobs: Sequence[Sequence[R]], indices: Sequence[int]
) -> Chosen | None:
    """Return the mildest options of these knobs that work together; None if the strongest do not,
    or if a part of them is enough."""
    options = [len(knobs[i]) - 1 for i in indices]
    if not try_set(tuple(zip(indices, options, strict=True))):
        return None
    for position in range(len(indices)):
        low, high = 0, options[position]
        while low < high:  # the strongest works: the mildest that does, by halving
            middle = (low + high) // 2
            options[position] = middle
            if try_set(tuple(zip(indices, options, strict=True))):
                high = middle
            else:
                low = middle + 1
        options[position] = high
    chosen = tuple(zip(indices, options, strict=True))
    for left_out in range(len(chosen) if len(chosen) > 1 else 0):
        if try_set(chosen[:left_out] + chosen[left_out + 1 :]):
            return None
    return chosen
