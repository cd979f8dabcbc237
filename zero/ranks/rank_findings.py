"""The search for the rank that kept a collective from ending, in the records that ranks publish."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from offload.zero.ranks.rank_records import Activity, RankRecord


@dataclass(frozen=True, slots=True)
class Findings:
    """The ranks that are to blame, and why, for a person to read."""

    ranks: tuple[int, ...]
    text: str
    remedy: str = ""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Findings:
        raw: dict[str, Any] = json.loads(text)
        return cls(tuple(raw["ranks"]), raw["text"], raw["remedy"])


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
            return Findings(tuple(found), "; ".join(texts))
    return Findings((), "no rank is missing")


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


# ---------------------------------------------------------------- ranks that wait for each other
_MODULES = (
    "All ranks have to call the same modules in the same order; where ranks choose (a branch, a "
    "tower without inputs), name in groups.blocks the class of a module around the choice that "
    "every rank calls: it is gathered as one. "
)
_ACTIONS = (
    "Forward and backward passes, optimizer.step(), evaluations, checkpoints and state dicts are "
    "for all ranks alike: take them out of what only one rank runs; a rank without data calls "
    "engine.idle()"
)
_LEFT = (
    "A rank with fewer batches ends its loop earlier: give each rank equally many (a sampler with "
    "drop_last=True), or call engine.idle() where it has none"
)


def find_parted(
    mine: int, before: Mapping[int, RankRecord | None], now: Mapping[int, RankRecord | None]
) -> Findings | None:
    """Return why rank `mine` waits for ever, and for which ranks: each rank that could end its wait
    is stuck itself, in another collective, or has left. `before` and `now` are the records of all
    ranks, its own too, of two times.

    Returns None as long as any of them may come: one that computes, or reads its parameters, or has
    not been heard from between the two times.
    """
    stuck = {rank for rank, record in now.items() if _is_still_stuck(before.get(rank), record)}
    left = {rank for rank, record in now.items() if record is not None and record.left is not None}
    live = now.keys() - stuck - left
    while True:
        free = {rank for rank in stuck - live if _may_end(rank, now, live)}
        if not free:
            break
        live |= free
    if mine in live or mine not in stuck:
        return None
    return _told(mine, stuck - live, _missing_among(left, stuck - live, now), now)


def _is_still_stuck(before: RankRecord | None, now: RankRecord | None) -> bool:
    """Return whether a rank has spoken, and has begun and ended nothing in between."""
    return (
        before is not None and now is not None and now.left is None
        and before.is_stuck and now.is_stuck and now.beat > before.beat
        and before.doing == now.doing and before.done == now.done
    )  # fmt: skip


def _may_end(rank: int, now: Mapping[int, RankRecord | None], live: set[int]) -> bool:
    """Return whether a collective that a stuck rank is in has all its ranks, or gets them."""
    record = now[rank]
    assert record is not None, "it is stuck"
    return any(
        all(other in live or _is_in(each, now.get(other)) for other in each.members)
        for each in record.doing
    )


def _is_in(activity: Activity, record: RankRecord | None) -> bool:
    if record is None:
        return True  # nothing is known of it
    if record.number_in(activity.lane) != activity.number:
        return record.number_in(activity.lane) > activity.number
    there = record.doing_in(activity.lane) or record.done.get(activity.lane)
    # small messages tell by themselves what each rank wants
    return there is None or there.what == activity.what or activity.lane == "control"


def _missing_among(
    left: set[int], stuck: set[int], now: Mapping[int, RankRecord | None]
) -> set[int]:
    """Return the ranks that have left, and are waited for."""
    doing = [each for rank in stuck for each in getattr(now[rank], "doing", ())]
    return {
        rank for rank in left
        if any(rank in each.members and not _is_in(each, now[rank]) for each in doing)
    }  # fmt: skip


def _told(
    mine: int, stuck: set[int], left: set[int], now: Mapping[int, RankRecord | None]
) -> Findings:
    places = {rank: _place(now[rank]) for rank in sorted(stuck)}
    often = Counter(places.values())
    most, count = often.most_common(1)[0]
    remedy = _MODULES + _ACTIONS
    if left:
        failed = any(getattr(now[rank], "left", "") for rank in left)  # it says why itself
        culprits, remedy = sorted(left), "" if failed else _LEFT
    elif count > len(places) - count:
        culprits = [rank for rank in places if places[rank] != most]
    else:  # of two ranks each is as odd as the other
        culprits = [rank for rank in places if rank != mine]
    lanes = {each.lane for rank in stuck for each in getattr(now[rank], "doing", ())}
    if not left and not lanes <= {"gather", "reduce"}:
        remedy = _ACTIONS
    texts = [f"rank {rank} {_how_left(now[rank])}" for rank in sorted(left)]
    for place in sorted(often, key=lambda place: often[place]):
        texts.append(f"{_named([r for r in places if places[r] == place])} in {place}")
    text = f"{'; '.join(texts)}: the ranks went different ways"
    return Findings(tuple(culprits), text, remedy)


def _place(record: RankRecord | None) -> str:
    assert record is not None, "it is stuck"
    return " and ".join(sorted(each.what for each in record.doing))


def _how_left(record: RankRecord | None) -> str:
    assert record is not None, "it has left"
    return f"has left: {record.left}" if record.left else "has closed its engine"


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    return f"ranks {', '.join(map(str, ranks))} wait"
