"""The arena: exact sizes, holes refilled, neighbours coalesce."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offload.tiers.arena import Arena
from offload.tiers.tier import PAGE_NBYTES


def test_freeing_twice_raises():
    arena = Arena(PAGE_NBYTES)
    offset = arena.allocate(1)
    arena.free(offset)
    with pytest.raises(KeyError):
        arena.free(offset)


class ArenaMachine(RuleBasedStateMachine):
    """Any order of allocations and frees, against a plain list of pages."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(32 * PAGE_NBYTES)
        self.owner = [0] * 32  # which allocation holds each page
        self.held: dict[int, int] = {}  # offset -> id
        self.count = 0

    @rule(pages=st.integers(1, 12))
    def allocate(self, pages: int) -> None:
        offset = self.arena.allocate(pages * PAGE_NBYTES)
        free_runs = "".join("x" if owner else "." for owner in self.owner).split("x")
        assert (offset is None) == (max(map(len, free_runs)) < pages)
        if offset is None:
            return
        self.count += 1
        first = offset // PAGE_NBYTES
        assert not any(self.owner[first : first + pages])
        self.owner[first : first + pages] = [self.count] * pages
        self.held[offset] = self.count

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.held)))
        number = self.held.pop(offset)
        self.owner = [0 if owner == number else owner for owner in self.owner]
        self.arena.free(offset)

    @invariant()
    def the_ranges_tile_the_arena(self) -> None:
        self.arena.check()
        assert self.arena.used_nbytes == sum(map(bool, self.owner)) * PAGE_NBYTES


ArenaMachine.TestCase.settings = settings(max_examples=60, deadline=None, derandomize=True)
TestArenaMachine = ArenaMachine.TestCase
