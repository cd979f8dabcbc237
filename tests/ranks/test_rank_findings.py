"""Who is to blame, from what the ranks said of themselves before and after."""

from __future__ import annotations

from dataclasses import replace

from offload.zero.ranks.rank_findings import Findings, find_missing, find_parted
from offload.zero.ranks.rank_records import Activity, RankRecord

MINE = Activity("gather", 7, "the all-gather of blocks.3", 100.0)
WAITING = RankRecord(10, 101.0, doing=(MINE,))
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


def test_a_rank_that_never_spoke_is_named() -> None:
    ranks, text = found_among(WAITING, None)
    assert ranks == (2,)
    assert "never come to offload.initialize" in text


def test_who_left_because_of_others_is_not_named_beside_the_silent_one() -> None:
    gave_up = RankRecord(9, 101.0, left="RankError: rank 1: ...", blames=(2,))
    assert found_among(gave_up, WAITING, silent=(2,))[0] == (2,)


def test_who_left_because_of_others_is_named_if_nobody_else_is() -> None:
    gave_up = RankRecord(9, 101.0, left="RankError: rank 1: ...", blames=(2,))
    assert found_among(gave_up, WAITING) == ((1,), "rank 1 has left: RankError: rank 1: ...")


def test_who_left_is_named_before_those_who_are_late() -> None:
    late = RankRecord(9, 101.0, done={"gather": BEFORE})
    assert found_among(late, RankRecord(9, 101.0, left="ValueError: x"))[0] == (2,)
    assert found_among(late, RankRecord(9, 101.0, left="")) == (
        (2,),
        "rank 2 has closed its engine",
    )


def test_another_collective_in_the_same_place_is_told() -> None:
    other = replace(MINE, what="the all-gather of blocks.1")
    ranks, text = found_among(RankRecord(9, 104.0, doing=(other,)), WAITING)
    assert ranks == (1,)
    assert "is in the all-gather of blocks.1 instead, for 4.0 s" in text


def test_an_idle_rank_is_named_before_one_that_waits_elsewhere() -> None:
    idle = RankRecord(9, 101.0, done={"gather": BEFORE})
    norms = Activity("control", 3, "the all-gather of gradient norms", 99.0)
    busy = RankRecord(9, 101.0, doing=(norms,), done={"gather": BEFORE})
    ranks, text = found_among(busy, idle)
    assert ranks == (2,)
    assert "it had ended the all-gather of blocks.2 3.0 s before" in text
    ranks, text = found_among(busy, WAITING)
    assert ranks == (1,)
    assert "it is in the all-gather of gradient norms, for 2.0 s" in text


def test_records_survive_the_store() -> None:
    record = RankRecord(9, 1.5, (MINE,), {"gather": BEFORE}, "ValueError: ü", (1, 2))
    assert RankRecord.from_text(record.to_text()) == record


# ------------------------------------------------------------------------- waiting for each other
ALL = (0, 1, 2)
LAST = {"gather": replace(BEFORE, members=ALL)}


def stuck(lane: str, number: int, what: str, members: tuple[int, ...] = ALL) -> RankRecord:
    """Waits in this, and has ended six gathers."""
    doing = (Activity(lane, number, what, 100.0, members),)
    return RankRecord(10, 101.0, doing=doing, done=LAST, is_stuck=True)


TOWER = stuck("gather", 7, "the all-gather of towers.3")
OTHER = stuck("gather", 7, "the all-gather of towers.4")
NORMS = stuck("control", 3, "the norms")
COMPUTES = RankRecord(10, 101.0, done=LAST)
CLOSED = RankRecord(9, 99.0, done=LAST, left="")


def parted(*now: RankRecord | None, silent: tuple[int, ...] = ()) -> Findings | None:
    """What rank 0 finds, of what all ranks say."""
    records = dict(enumerate(now))
    before = {
        rank: record if record is None or rank in silent else replace(record, beat=record.beat - 1)
        for rank, record in records.items()
    }
    return find_parted(0, before, records)


def test_ranks_in_different_collectives_wait_for_ever() -> None:
    for others, culprits in (((OTHER, TOWER), (1,)), ((OTHER, OTHER), (0,)), ((NORMS,) * 2, (0,))):
        found = parted(TOWER, *others)
        assert found is not None
        assert found.ranks == culprits
        assert Findings.from_text(found.to_text()) == found
    found = parted(TOWER, NORMS, OTHER)
    assert found is not None
    assert found.ranks == (1, 2)
    assert "rank 1 waits in the norms; rank 2 waits in the all-gather of towers.4" in found.text


def test_a_rank_that_may_still_come_is_waited_for() -> None:
    gathers_ahead = replace(OTHER, is_stuck=False)  # its model's thread computes
    for other in (COMPUTES, gathers_ahead, None):
        assert parted(TOWER, other, TOWER) is None
        assert parted(NORMS, other, NORMS) is None
    assert parted(TOWER, NORMS, silent=(1,)) is None  # not heard from: it may be slow


def test_a_collective_that_all_are_in_is_waited_for() -> None:
    """It may be large. The rank that waits for those in it gets them then."""
    pair = stuck("gather", 7, "the all-gather of towers.3", members=(1, 2))
    assert parted(TOWER, TOWER, TOWER) is None
    assert parted(NORMS, pair, pair) is None


def test_ranks_that_went_on_between_two_looks_do_not_wait() -> None:
    before = {0: TOWER, 1: OTHER, 2: OTHER}
    later = replace(OTHER, beat=11, doing=(replace(OTHER.doing[0], number=8),))
    now = {0: replace(TOWER, beat=11), 1: later, 2: later}
    assert find_parted(0, before, now) is None


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    found = parted(TOWER, TOWER, CLOSED)
    assert found is not None
    assert found.ranks == (2,)
    assert found.text.startswith("rank 2 has closed its engine; ranks 0, 1 wait in the all-gather")
    came = replace(CLOSED, done={"gather": TOWER.doing[0]})  # what it sent is on its way
    assert parted(TOWER, TOWER, came) is None
