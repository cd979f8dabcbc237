"""Smallest sets of changes that make something work, found by trying.

A ladder is one thing that can be changed, its rungs from the mildest to the strongest change; a
stronger rung never helps less. A set takes one rung of each of some ladders. It is minimal if it
works, and neither without one of its rungs nor with a milder one in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import TypeVar

R = TypeVar("R")
MOST_RUNGS_IN_A_SET = 3


Chosen = tuple[tuple[int, int], ...]  # (ladder, rung) pairs


def minimal_sets(
    ladders: Sequence[Sequence[R]], works: Callable[[tuple[R, ...]], bool], *, most_tries: int,
    enough: int,
) -> list[tuple[R, ...]]:  # fmt: skip
    """Minimal sets of one change, then of two, then of three; larger ones only while fewer than
    `enough` are known. Deterministic; earlier ladders are tried first."""
    answers: dict[Chosen, bool] = {}

    def try_set(chosen: Chosen) -> bool:
        """False, too, where nothing more may be asked: a search always ends soon."""
        if chosen not in answers and len(answers) < most_tries:
            answers[chosen] = works(tuple(ladders[i][r] for i, r in chosen))
        return answers.get(chosen, False)

    found: list[Chosen] = []
    for size in range(1, MOST_RUNGS_IN_A_SET + 1):
        if len(found) >= enough:
            break
        helpful = {ladder for chosen in found for ladder, _ in chosen}
        alone = {chosen[0][0] for chosen in found if len(chosen) == 1}
        for indices in _sets_of(size, ladders, alone, helpful):
            chosen = _mildest(try_set, ladders, indices)
            if chosen is not None:
                found.append(chosen)
            if size > 1 and len(found) >= enough:
                break
    return [tuple(ladders[i][r] for i, r in chosen) for chosen in found]


def _sets_of(
    size: int, ladders: Sequence[Sequence[R]], alone: set[int], used: set[int]
) -> Iterator[tuple[int, ...]]:
    """Sets of ladders without one that is enough by itself, or a part that is known to be."""
    usable = [i for i, ladder in enumerate(ladders) if ladder and i not in alone]
    for indices in combinations(usable, size):
        if size < 3 or not used.issuperset(indices):
            yield indices


def _mildest(
    try_set: Callable[[Chosen], bool], ladders: Sequence[Sequence[R]], indices: Sequence[int]
) -> Chosen | None:
    """The mildest rungs of these ladders that work together; None if the strongest do not, or a
    part of them is enough."""
    rungs = [len(ladders[i]) - 1 for i in indices]
    if not try_set(tuple(zip(indices, rungs, strict=True))):
        return None
    for position in range(len(indices)):
        low, high = 0, rungs[position]
        while low < high:  # the strongest works: the mildest that does, by halving
            middle = (low + high) // 2
            rungs[position] = middle
            if try_set(tuple(zip(indices, rungs, strict=True))):
                high = middle
            else:
                low = middle + 1
        rungs[position] = high
    chosen = tuple(zip(indices, rungs, strict=True))
    for left_out in range(len(chosen) if len(chosen) > 1 else 0):
        if try_set(chosen[:left_out] + chosen[left_out + 1 :]):
            return None
    return chosen
