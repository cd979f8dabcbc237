"""Who is to blame, from what the ranks said of themselves before and after."""

from __future__ import annotations

from dataclasses import replace

from offload.zero.ranks.rank_findings import find_missing
from offload.zero.ranks.rank_records import Activity, RankRecord

MINE = Activity("gather", 7, "the all-gather of blocks.3", 100.0)
WAITING = RankRecord(10, 101.0, doing=(MINE,), begun={"gather": 7})
BEFORE = Activity("gather", 6, "the all-gather of blocks.2", 98.0)


def found_among(
    *after: RankRecord | None, silent: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], str]:
    """`after`: what ranks 1, 2, ... say. Those that are not silent said something else before."""
    records = dict(enumerate(after, 1))
    before = {
        rank: record if record is None or rank in silent else replace(record, beat=record.beat - 1)
        for rank, record in records.items()
    }
    found = find_missing(MINE, records, before, records)
    return found.ranks, found.text


def test_who_waits_in_the_same_collective_is_not_to_blame() -> None:
    assert found_among(WAITING, WAITING) == ((), "no rank is missing")


def test_who_waits_for_this_rank_elsewhere_is_named() -> None:
    """Ranks in different lanes: each finds the other missing, and this one is the last to ask."""
    there = RankRecord(
        10, 101.0, doing=(replace(MINE, lane="control", what="the norms"),), blames=(0,)
    )
    ranks, text = found_among(there)
    assert ranks == (1,)
    assert "it is in the norms" in text


def test_a_silent_rank_is_named_with_what_it_was_in() -> None:
    ranks, text = found_among(WAITING, WAITING, silent=(2,))
    assert ranks == (2,)
    assert "has not been heard from since" in text
    assert "when it was in the all-gather of blocks.3" in text


def test_who_left_because_of_others_is_not_named_beside_the_silent_one() -> None:
    gave_up = RankRecord(9, 101.0, left="RankError: rank 1: ...", blames=(2,))
    assert found_among(gave_up, WAITING, silent=(2,))[0] == (2,)


def test_who_left_is_named_before_those_who_are_late() -> None:
    late = RankRecord(9, 101.0, begun={"gather": 6}, last=BEFORE)
    assert found_among(late, RankRecord(9, 101.0, left="ValueError: x"))[0] == (2,)
    assert found_among(late, RankRecord(9, 101.0, left="")) == (
        (2,),
        "rank 2 has closed its engine",
    )


def test_another_collective_in_the_same_place_is_told() -> None:
    other = replace(MINE, what="the all-gather of blocks.1")
    earlier = replace(BEFORE, since=99.0)  # still queued on a GPU
    doing = RankRecord(9, 104.0, doing=(earlier, other), begun={"gather": 7})
    ranks, text = found_among(doing, WAITING)
    assert ranks == (1,)
    assert "is in the all-gather of blocks.1 instead, for 4.0 s" in text


def test_who_closed_its_engine_because_of_others_is_said_to_have() -> None:
    assert found_among(RankRecord(9, 101.0, left="", blames=(3,)), WAITING) == (
        (1,),
        "rank 1 has closed its engine",
    )
