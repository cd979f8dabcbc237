"""Watches collectives, so that no rank waits for ever and a missing rank is named.

    with watch.during("the all-gather of blocks.3", group) as limit:   # a timedelta
        ... the collective ...

Each rank tells the others twice a second that it lives and what it is in:

    rank 0  ── beat 41, in the all-gather of blocks.3 ──▶ ┌───────┐
    rank 1  ── beat 40, in nothing ─────────────────────▶ │ store │ ◀── read when a collective fails
    rank 2  ── beat 12, left: BudgetError ... ──────────▶ └───────┘

The store is that of the process group. A record is replaced by the next one (a `FileStore` alone
keeps all: some 20 MB per rank and day). When a collective fails - a connection is closed because a
rank was killed, or `timeout_s` has passed because it stalls - what the others say is read twice,
and a rank that is silent, has left, or is not in it is named in the RankError that replaces the
backend's error. After that no collective is begun any more: each raises at once.

Where ranks gather together, one that waits compares what it has begun with the next rank's: two
that differ wait for ever, and all ranks are told so at once (`RankWatch.follow`).

No rank waits longer than `timeout_s`, plus what it takes to ask: a collective that begins while
another one of training waits is given what that one has left, and closing does not wait again.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]

from offload.swap.device.streams import StreamEvent, mark_here
from offload.swap.threads.lanes import Lane, WaitFor
from offload.tiers import accelerator
from offload.tiers.errors import RankError

_log = logging.getLogger("offload")

BEAT_S = 0.5
PATIENCE_S = 2.5  # a rank that lives has spoken within it: five beats
_ASKING_S = 3.5  # the longest that asking may take, also if the store hangs
_SOON_S = 1.0  # what has begun earlier may wait for what never comes
_MOST = 1024  # begun in a turn: in evaluation, ranks exchange nothing
_STOP = 4  # the tag of a message that is never sent
_MIN_WAIT_S = 2.0  # for a collective that begins just before another one's time is over
_GONE = "it ended, or was killed, stopped or cut off"
_REMEDY = (
    ". Forward and backward passes, optimizer.step(), evaluations, checkpoints and state dicts are "
    "for all ranks alike, and equally many on each (a sampler with drop_last=True): take them out "
    "of what only one rank runs. At stage 3 on GPUs all ranks call the same modules in the same "
    "order: give a rank without an image for a tower a blank one whose loss counts 0, or set "
    "zero.stage: 2"
)


@dataclass(frozen=True, slots=True)
class Findings:
    """The ranks that are missing, and why, for a person to read."""

    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class RankRecord:
    beat: int  # counts up while the rank lives
    doing: Sequence[str] = ()  # the collectives that it is in
    left: str | None = None  # why, "" if it has simply closed its engine


class Notices:
    """What the ranks that made the same engine tell each other. For one thread. Calls may block for
    as long as the process behind the store is stopped, and raise RuntimeError once it is gone."""

    def __init__(self, store: Store, prefix: str) -> None:
        # A client does one thing at a time: one that is stuck must not keep another from it, nor
        # the process group.
        self._store = PrefixStore(prefix, _client(store))

    def put(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """Return what was last put there, None if nothing was."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def record(self, rank: int) -> RankRecord | None:
        told = self.get(str(rank))
        return told and RankRecord(**told)

    def verdict(self) -> Findings | None:
        """Return what one rank has found for all of them."""
        told = self.get("verdict")
        return told and Findings(tuple(told[0]), told[1])


@dataclass(slots=True)
class _Watched:
    """A collective that this rank is in."""

    what: str
    members: tuple[int, ...]  # the ranks that take part in it
    began: float  # by the monotonic clock
    groups: tuple[dist.ProcessGroup, ...]
    is_queued: bool  # on a GPU: no thread of the host waits in it
    beside: bool  # on a thread that training does not wait for
    mark: StreamEvent | None = None  # queued up to here on a GPU


class RankWatch:
    """One rank's view of all that make the same engine. Thread-safe."""

    def __init__(
        self, store: Store, rank: int, ranks: Sequence[int], timeout_s: float, device: torch.device
    ) -> None:
        """Begin to tell the others of `ranks`. `device` is where the model computes."""
        self.timeout_s = timeout_s
        self._rank = rank
        self._others = [other for other in ranks if other != rank]
        self._device = device
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        # every rank makes its engines in the same order: their number tells them apart, and the
        # start does from those before a restart by a launcher that keeps its store
        kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if kept else "0"
        prefix = f"offload/records/{start}/{store.add(f'offload/engines/{start}/{rank}', 1)}"
        self._told, self._asked = Notices(store, prefix), Notices(store, prefix)
        self.follows = False  # ranks gather together
        self.begun: tuple[int, list[str]] = 0, []  # in order; a turn ends when all ranks agree
        self._next = ranks[(ranks.index(rank) + 1) % len(ranks)]
        self.lane = Lane(WaitFor.RANKS)
        self._lock = threading.Lock()  # guards the fields below; never held while anything blocks
        self._beat = 0
        self._doing: list[_Watched] = []
        self._left: str | None = None
        self._failure: RankError | None = None
        self._closing = self._aborting = False
        self._unheard = False  # the store is gone or hangs
        self._asking = threading.Lock()  # one thread asks, the others take over what it found
        self._findings: Findings | None = None
        self._wake, self._told_all = threading.Event(), threading.Event()
        self._publish()
        self._thread = threading.Thread(target=self._tell, name="offload-ranks", daemon=True)
        self._thread.start()

    @contextmanager
    def during(
        self, what: str, *groups: dist.ProcessGroup, members: tuple[int, ...] = (),
        on_device: bool = False, beside: bool = False,
    ) -> Iterator[timedelta]:  # fmt: skip
        """Inside, this rank is in `what`, with the ranks of `groups`, or with `members` (neither:
        with all). Gives the longest that anything inside may wait; collectives of `groups` on a CPU
        are held to it by themselves. `on_device`: they compute where the model does, and are queued
        there if it is a GPU. `beside`: training does not wait for this thread, nor it for training.

        RankError for a RuntimeError inside, and at once after an earlier one.
        """
        ranks = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
        members = tuple(sorted(ranks or members or (self._rank, *self._others)))
        is_queued = on_device and accelerator.is_accelerator(self._device)
        watched = _Watched(what, members, time.monotonic(), groups, is_queued, beside)
        limit = self._begin(watched)
        try:
            for group in () if watched.is_queued else groups:  # old PyTorch has `timeout_s` alone
                getattr(group, "set_timeout", lambda _: None)(limit)
            with self.lane.waiting():
                yield limit
        except RuntimeError as error:
            raise self._explain(watched, error) from error
        if watched.is_queued:
            watched.mark = mark_here(self._device)  # in it until the GPU is
        else:
            with self._lock:
                self._doing.remove(watched)

    def _begin(self, watched: _Watched) -> timedelta:
        with self._lock:
            if self._failure is not None:
                text = f"rank {self._rank}: {watched.what} is not begun, for an earlier one failed"
                raise RankError(f"{text}: {self._failure}", ranks=self._failure.ranks)
            alike = [each for each in self._doing if each.beside is watched.beside]
            waiting = [each.began for each in alike if each.mark is None]
            left = self.timeout_s - (watched.began - min(waiting, default=watched.began))
            self._doing.append(watched)
        return timedelta(seconds=max(left, min(self.timeout_s, _MIN_WAIT_S)))

    def _explain(self, watched: _Watched, error: RuntimeError | None) -> RankError:
        """Return the error for a collective that failed. This rank's record stays in it."""
        took = time.monotonic() - watched.began
        among = f"among ranks {', '.join(map(str, watched.members))}"
        head = f"rank {self._rank}: {watched.what} {among} failed after {took:.1f} s"
        # a launcher may end this process before the others have been asked
        _log.error("%s; asking which ranks are missing (%s)", head, _first_line(error))
        with self._asking:
            if self._findings is None:
                self._findings = self._ask_in_time(watched)
            findings = self._findings
        explained = RankError(
            f"{head}: {findings.text}. Start all ranks again, from the last checkpoint; "
            f"zero.timeout_s ({self.timeout_s:g}) is the longest wait for a rank",
            ranks=findings.ranks,
        )
        with self._lock:
            self._failure = self._failure or explained
        self._wake.set()
        return explained

    def follow(self, what: str) -> None:
        """Note that this rank begins what all ranks begin in the same order, that of the program:
        gathers where ranks gather together, and exchanges of numbers. Ranks that differ in it wait
        for each other for ever, however slow they are; those that do not are only slow.
        Not reductions: they come in other places where gradients are missing."""
        if self.follows:
            turn, begun = self.begun
            if len(begun) == _MOST:
                turn, begun = turn + 1, [f"other calls before ({crc32(''.join(begun).encode()):x})"]
            self.begun = turn, [*begun, what]

    def await_difference(self) -> NoReturn:
        """Wait inside `during` while the watches of ranks that differ find out where; raises the
        RuntimeError that becomes their RankError."""
        deadline = time.monotonic() + 2 * PATIENCE_S
        while self._findings is None and time.monotonic() < deadline:
            time.sleep(BEAT_S / 2)
        raise RuntimeError("the ranks went different ways")

    def parted(self, why: str) -> RankError:
        """Return the error for this and all other ranks: no collective is begun any more."""
        error = RankError(f"rank {self._rank}: {why}", ranks=(self._rank, *self._others))
        with self._lock:
            self._failure = self._failure or error
        return error

    def _ask_in_time(self, watched: _Watched) -> Findings:
        """Ask on a separate thread, which may be left behind: the store may hang."""
        answers: list[Findings] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the store is gone
                answers.append(self._ask(watched))

        asking = threading.Thread(target=ask, name="offload-asks", daemon=True)
        asking.start()
        asking.join(_ASKING_S)
        if answers:
            return answers[0]
        self._unheard = True
        self._told_all.set()  # no thread has to wait for that any more
        text = "the store of the process group does not answer, so the others could not be asked; "
        return Findings((), f"{text}of what hosts it (the launcher, or rank 0) holds: {_GONE}")

    def _ask(self, watched: _Watched) -> Findings:
        if (verdict := self._asked.verdict()) is not None:
            return verdict
        before = {rank: self._asked.record(rank) for rank in self._others}
        after, unsure = dict(before), set(self._others)
        deadline = time.monotonic() + PATIENCE_S
        while unsure and time.monotonic() < deadline:
            time.sleep(BEAT_S / 2)
            for rank in tuple(unsure):
                first, now = before[rank], self._asked.record(rank)
                after[rank] = now
                spoke = now is not None and (first is None or now.beat > first.beat)
                if spoke or (now is not None and now.left is not None):
                    unsure.discard(rank)
        return _find_missing(watched, before, after)

    # ---------------------------------------------------------------- telling the others
    def _publish(self) -> None:
        with self._lock:
            self._beat += 1
            record = RankRecord(self._beat, [each.what for each in self._doing], self._left)
        self._told.put(str(self._rank), asdict(record))

    def _tell(self) -> None:
        """Publish this rank's record, on the telling thread."""
        while True:
            self._wake.wait(BEAT_S)
            self._wake.clear()
            leaving, closing = self._left is not None, self._closing
            try:
                self._publish()
                self._compare_orders(leaving)
            except RuntimeError as error:  # its host has ended: perhaps all have
                _log.debug("rank %d cannot be heard any more: %s", self._rank, error)
                closing = True
            if leaving or closing:
                self._told_all.set()
            if closing:
                return
            self._look_at_device()

    def _compare_orders(self, leaving: bool) -> None:
        """Tell what this rank has begun if it waits, or leaves; and compare it with the next rank's
        while it waits. If all wait, some rank differs from the next one."""
        soon = time.monotonic() - _SOON_S
        with self._lock:
            waiting = [each for each in self._doing if each.began < soon]
        if not (self.follows and (waiting or leaving)):
            return
        turn, mine = self.begun
        self._told.put(f"order/{self._rank}", (turn, mine))
        if not waiting or self._aborting:
            return
        found, theirs = self._told.verdict(), self._told.get(f"order/{self._next}")
        if found is None and theirs is not None and theirs[0] == turn:
            pairs = zip(mine, theirs[1], strict=False)
            for here, there in (each for each in pairs if each[0] != each[1]):
                text = f"rank {self._rank} has begun {here}; rank {self._next} has begun {there}"
                said = f"the ranks went different ways: {text}{_REMEDY}"
                found = Findings((self._rank, self._next), said)
                self._told.put("verdict", (found.ranks, found.text))
                break
        if found is not None:
            self._findings = self._findings or found
            self._abort(waiting[0])

    def leave(self) -> None:
        """Tell the others that this rank takes part in nothing any more, and why: the exception
        that is being handled, if any. The first call counts. Blocks for 1.5 s at most."""
        error = sys.exception()
        with self._lock:
            if self._left is not None:
                return
            said = "" if error is None else f"{type(error).__name__}: {_first_line(error)}"
            self.follow(f"its end ({said or 'it has closed its engine'})")
            self._left = said
            if isinstance(error, RankError) and self._failure is None:
                self._failure = error
        self._wake.set()
        self._told_all.wait(1.5)

    @property
    def is_leaving(self) -> bool:
        """Whether this rank takes part in nothing any more: it has left, or a collective failed."""
        return self._left is not None or self._failure is not None

    def close(self) -> None:
        """Leave, and stop telling. Calling it again does nothing."""
        self.leave()
        self._closing = True
        self._wake.set()
        self._thread.join(0.1 if self._unheard else 1.0)

    # ---------------------------------------------------------------- on a GPU
    # NCCL's collectives are queued, and no host thread waits in them: the telling thread sees which
    # have not ended in time, and aborts their communicators, so that streams go on and threads
    # that wait for them are free. What they computed is not used: the next collective raises.
    # (Written for several GPUs and not yet run on any.)
    def _look_at_device(self) -> None:
        with self._lock:
            queued = [(each, each.mark) for each in self._doing if each.mark is not None]
        for watched, mark in queued:
            if mark.done():
                with self._lock:
                    self._doing.remove(watched)
            elif time.monotonic() - watched.began > self.timeout_s and not self._aborting:
                self._abort(watched)
                return

    def _abort(self, watched: _Watched) -> None:
        """End `watched` and all else that this rank is in, on another thread: this one has to go on
        telling."""
        self._aborting = True

        def abort() -> None:
            _log.error("%s", self._explain(watched, None))
            with self._lock:
                doing = list(self._doing)  # nothing is begun any more
            for each in doing:
                for group in each.groups:
                    _abort_group(group, is_queued=each.is_queued)

        threading.Thread(target=abort, daemon=True).start()


def _find_missing(
    mine: _Watched, before: Mapping[int, RankRecord | None],
    after: Mapping[int, RankRecord | None],
) -> Findings:  # fmt: skip
    """Return the ranks that keep `mine` from its end. `before` and `after` are the records of all
    other ranks, read at two times between which every living rank has spoken.

    A silent rank is the reason why others are late or have left, and one that left with an error
    of its own comes before those that left because of it: the first that is found is the answer.
    """
    silent, left, late = {}, {}, {}
    for rank, record in after.items():
        if record is None:
            silent[rank] = "has never come to offload.initialize, or was killed there"
        elif record.left is not None:
            left[rank] = f"has left: {record.left}" if record.left else "has closed its engine"
        elif (first := before.get(rank)) is not None and record.beat <= first.beat:
            silent[rank] = f"is silent, and was in {_place_of(record)}: {_GONE}"
        elif rank in mine.members and mine.what not in record.doing:
            late[rank] = f"lives and has not come to it, but is in {_place_of(record)}"
    own = {rank: why for rank, why in left.items() if RankError.__name__ not in why}
    for reasons, remedy in (silent, ""), (own, _REMEDY), (late, _REMEDY), (left, ""):
        if reasons:
            texts = [f"rank {rank} {text}" for rank, text in reasons.items()]
            return Findings(tuple(reasons), "; ".join(texts) + remedy)
    return Findings((), "no rank is missing")


def _abort_group(group: dist.ProcessGroup, *, is_queued: bool) -> None:
    """End what this rank waits for in a group; nothing more is done in it."""
    if is_queued:
        group.abort()
        return
    for other in set(range(group.size())) - {group.rank()}:
        with suppress(RuntimeError):  # gloo closes all connections where a message does not come
            group.recv([torch.empty(1)], other, _STOP).wait(timedelta(milliseconds=1))


def _place_of(record: RankRecord) -> str:
    return " and ".join(record.doing) or "none of the engine's collectives"


def _first_line(error: BaseException | None) -> str:
    return str(error).partition("\n")[0] if error is not None else "it has not ended"


def _client(store: Store) -> Store:
    if isinstance(store, FileStore):
        # One that was told the number of ranks removes the file when as many have ended.
        return FileStore(store.path, -1)  # type: ignore[attr-defined]
    clone: Store = store.clone()  # type: ignore[attr-defined]
    return clone
