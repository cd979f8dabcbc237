"""The search for the rank that kept a collective from ending, in the records that ranks publish."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from offload.zero.ranks.rank_records import Activity, RankRecord

_ALIKE = (
    "Forward and backward passes, optimizer.step(), evaluations, checkpoints and state dicts are "
    "for all ranks alike: take them out of what only one rank runs. At stage 3 all ranks call the "
    "same modules in the same order: where ranks choose (a branch, a tower without inputs), name "
    "in groups.blocks the class of a module around the choice that every rank calls"
)
_AS_MANY = (
    "A rank with fewer batches ends its loop earlier: give each rank equally many (a sampler with "
    "drop_last=True)"
)


@dataclass(frozen=True, slots=True)
class Findings:
    """The ranks that are to blame, and why, for a person to read."""

    ranks: tuple[int, ...]
    text: str
    remedy: str = ""


def find_missing(
    mine: Activity, members: Collection[int], before: Mapping[int, RankRecord | None],
    after: Mapping[int, RankRecord | None],
) -> Findings:  # fmt: skip
    """Return the ranks missing from `mine`, a collective of `members`. `before` and `after` are the
    records of all other ranks, read at two times between which every living rank has spoken.

    A rank that is gone, or left with an error of its own, is the reason why others are late, and
    why others left: the first of these that holds for any rank is the answer.
    """
    there = {rank: record for rank, record in after.items() if record is not None}
    silent = {rank: _silence(before.get(rank), record) for rank, record in after.items()}
    left = {rank: record for rank, record in there.items() if record.left is not None}
    why = {
        rank: f"has left: {record.left}" if record.left else "has closed its engine"
        for rank, record in left.items()
    }  # fmt: skip
    failed = {rank: text for rank, text in why.items() if not left[rank].blames}
    with_error = any(record.left for record in left.values())
    living = {rank: there[rank] for rank in there if rank in members and rank not in left}
    for found, remedy in (
        ({rank: text for rank, text in silent.items() if text}, ""),
        (failed, "" if with_error else _AS_MANY),
        (_apart(mine, living), _ALIKE),
        (why, ""),  # because of ranks of which nothing is known any more
    ):
        if found:
            texts = [f"rank {rank} {text}" for rank, text in found.items()]
            return Findings(tuple(found), "; ".join(texts), remedy)
    return Findings((), "no rank is missing")


def _silence(before: RankRecord | None, after: RankRecord | None) -> str:
    """Return the reason if a rank was killed, stopped, cut off, or has not even begun."""
    if after is None:
        return "has never come to offload.initialize, or was killed there"
    if after.left is not None or before is None or after.beat > before.beat:
        return ""
    where = f"was in {after.doing[-1].what}" if after.doing else _last_of(after)
    return (
        f"has not been heard from since {_clock(after.at)}, when it {where}: it was killed, "
        "stopped or cut off"
    )


def _apart(mine: Activity, living: Mapping[int, RankRecord]) -> dict[int, str]:
    """Return what ranks do that are in another collective in the place of `mine`, or have not come
    to it: of these, if there are any, those that wait in no other one, and blame no rank for it."""
    found = {}
    for rank, record in living.items():
        # on a GPU several of a lane may be queued
        place = mine.lane, mine.number
        now = next((each for each in record.doing if (each.lane, each.number) == place), None)
        if now is not None and now.what != mine.what:
            waits = _seconds(now.since, record.at)
            found[rank] = f"is in {now.what} instead, for {waits}: the ranks went different ways"
    if found:
        return found
    late = [rank for rank in living if living[rank].begun.get(mine.lane, 0) < mine.number]
    waits_for_others = {
        rank: (bool(living[rank].blames), bool(living[rank].doing)) for rank in late
    }
    least = min(waits_for_others.values(), default=None)
    return {rank: _lateness(living[rank]) for rank in late if waits_for_others[rank] == least}


def _lateness(record: RankRecord) -> str:
    if not record.doing:
        return f"lives and has not come to it: it {_last_of(record)}"
    now = record.doing[0]
    return f"has not come to it: it is in {now.what}, for {_seconds(now.since, record.at)}"


def _last_of(record: RankRecord) -> str:
    if record.last is None:
        return "had not been in any collective"
    return f"had ended {record.last.what} {_seconds(record.last.since, record.at)} before"


def _seconds(since: float, until: float) -> str:
    return f"{max(0.0, until - since):.1f} s"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
