"""The search for the rank that kept a collective from ending, in the records that ranks publish."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
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
    mine: Activity, members: Iterable[int], before: Mapping[int, RankRecord | None],
    after: Mapping[int, RankRecord | None],
) -> Findings:  # fmt: skip
    """Return the ranks missing from `mine`, a collective of `members`. `before` and `after` are the
    records of all other ranks, read at two times between which every living rank has spoken.

    A rank that is gone, or left with an error of its own, is the reason why others are late, and
    why others left: the first of these that holds for any rank is the answer.
    """
    members = set(members)
    for reason in (_silent, _failed, _elsewhere, _idle, _late, _gave_up, _crossed):
        anywhere = reason in (_silent, _failed, _gave_up)
        found = {
            rank: text for rank, record in after.items() if (anywhere or rank in members)
            and (text := reason(mine, before.get(rank), record)) is not None
        }  # fmt: skip
        if found:
            texts = [f"rank {rank} {text}" for rank, text in found.items()]
            return Findings(tuple(found), "; ".join(texts), _remedy(reason, after))
    return Findings((), "no rank is missing")


def _remedy(reason: object, after: Mapping[int, RankRecord | None]) -> str:
    """Return what to change in the program if its ranks do different things, else nothing."""
    if reason in (_elsewhere, _late, _crossed):
        return _ALIKE
    left = [record.left for record in after.values() if record is not None]
    return _AS_MANY if reason is _failed and not any(left) else ""


def _silent(mine: Activity, before: RankRecord | None, after: RankRecord | None) -> str | None:
    """Return the reason if a rank was killed, stopped, cut off, or has not even begun."""
    if after is None:
        return "has never come to offload.initialize, or was killed there"
    if after.left is not None or before is None or after.beat > before.beat:
        return None
    where = f"was in {after.doing[-1].what}" if after.doing else _last_of(after)
    return (
        f"has not been heard from since {_clock(after.at)}, when it {where}: it was killed, "
        "stopped or cut off"
    )


def _failed(mine: Activity, before: RankRecord | None, after: RankRecord | None) -> str | None:
    """Return the reason if a rank left because of something that no other rank did."""
    if after is None or after.left is None or after.blames:
        return None
    return f"has left: {after.left}" if after.left else "has closed its engine"


def _elsewhere(mine: Activity, before: RankRecord | None, after: RankRecord | None) -> str | None:
    """Return the reason if a rank is in another collective than `mine` in its place."""
    if after is None or after.left is not None or after.number_in(mine.lane) != mine.number:
        return None
    now = after.doing_in(mine.lane) or after.done.get(mine.lane)
    if now is None or now.what == mine.what:
        return None
    waits = _seconds(now.since, after.at)
    return f"is in {now.what} instead, for {waits}: the ranks went different ways"


def _idle(mine: Activity, before: RankRecord | None, after: RankRecord | None) -> str | None:
    """Return the reason if a rank has not come to it, and is in no collective."""
    if after is None or after.doing or after.blames or after.number_in(mine.lane) >= mine.number:
        return None
    return f"lives and has not come to it: it {_last_of(after)}"


def _late(mine: Activity, before: RankRecord | None, after: RankRecord | None) -> str | None:
    """Return the reason if a rank has not come to it, and waits in another one."""
    blames = after is None or after.blames
    return None if blames else _crossed(mine, before, after)


def _crossed(mine: Activity, before: RankRecord | None, after: RankRecord | None) -> str | None:
    """Return the reason as `_late`, also if the other one is where it waits for this rank."""
    if after is None or not after.doing or after.number_in(mine.lane) >= mine.number:
        return None
    waits = after.doing[0]
    return f"has not come to it: it is in {waits.what}, for {_seconds(waits.since, after.at)}"


def _gave_up(mine: Activity, before: RankRecord | None, after: RankRecord | None) -> str | None:
    """Return the reason if a rank left because of others, of which nothing is known any more."""
    return f"has left: {after.left}" if after is not None and after.left else None


def _last_of(record: RankRecord) -> str:
    last = max(record.done.values(), key=lambda activity: activity.since, default=None)
    if last is None:
        return "had not been in any collective"
    return f"had ended {last.what} {_seconds(last.since, record.at)} before"


def _seconds(since: float, until: float) -> str:
    return f"{max(0.0, until - since):.1f} s"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
