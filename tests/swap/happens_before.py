"""Which accesses to memory are ordered, whatever the timing was: a checker of happens-before.

    thread     ── launch ───────────────────────── wait ── read
                    │                               │
    stream     ─────┴─ copy ── event ───────────────┘
    stream                       └─ (waits) ── kernel

An *agent* is a stream or a thread: what it does is in order. Its vector clock says what every agent
had done that it is ordered after (Lamport, 1978; Fidge, 1988; Mattern, 1989). A launch, an event, a
wait or a transfer tells one agent what another one knows. Shadow memory remembers the last writer
of a byte and its readers since, with the time of each access (epochs, as in FastTrack; Flanagan
and Freund, 2009). Two accesses to a byte, one of them a write, that no chain of those orders are a
race, also where they came one after the other this time.
"""

import sys
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

Clock = dict[int, int]  # by agent: how much of what it did is known

_TRACED = ("/swap/", "/zero/", "/offload/")
_TOOLS = (
    "happens_before.py", "checked_world.py", "checked_kernels.py", "stream_simulation.py",
    "/swap/device/streams.py",
)  # fmt: skip


def merge(clock: Clock, other: Clock) -> None:
    for agent, time in other.items():
        if clock.get(agent, 0) < time:
            clock[agent] = time


class Agent:
    """A stream or a thread."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.clock: Clock = {number: 1}

    def learn(self, clock: Clock) -> None:
        merge(self.clock, clock)

    def tell(self) -> Clock:
        told = dict(self.clock)
        self.clock[self.number] += 1
        return told


@dataclass(frozen=True, slots=True)
class Access:
    agent: Agent
    time: int
    what: str

    def before(self, clock: Clock) -> bool:
        return clock.get(self.agent.number, 0) >= self.time

    def __str__(self) -> str:
        return f"{self.what} by {self.agent.name}"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses that nothing orders."""

    earlier: str
    later: str

    def __str__(self) -> str:
        return f"{self.earlier}  ||  {self.later}"


@dataclass(slots=True)
class _Span:
    """Bytes `[start, stop)` with one history."""

    start: int
    stop: int
    written: Access | None = None
    read: dict[int, Access] = field(default_factory=dict)  # since then, the last of each agent

    def unordered(self, clock: Clock, *, write: bool) -> Iterator[tuple[str, Access]]:
        if self.written is not None and not self.written.before(clock):
            yield "write", self.written
        if write:
            for access in self.read.values():
                if not access.before(clock):
                    yield "read", access


class Shadow:
    """The history of each byte that has one."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._spans: list[_Span] = []  # sorted, disjoint

    def __len__(self) -> int:
        return len(self._spans)

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        """The indices of the spans within `[start, stop)`; those over its ends are cut there."""
        for at in (start, stop):
            index = bisect_right(self._starts, at) - 1
            if index >= 0 and self._spans[index].start < at < self._spans[index].stop:
                span = self._spans[index]
                self._put(index + 1, _Span(at, span.stop, span.written, dict(span.read)))
                span.stop = at
        return bisect_left(self._starts, start), bisect_left(self._starts, stop)

    def _put(self, index: int, span: _Span) -> None:
        self._starts.insert(index, span.start)
        self._spans.insert(index, span)

    def over(self, start: int, stop: int) -> list[_Span]:
        first, last = self._range(start, stop)
        return self._spans[first:last]

    def wrote(self, start: int, stop: int, access: Access) -> None:
        self.forget(start, stop)
        self._put(bisect_left(self._starts, start), _Span(start, stop, access))

    def was_read(self, start: int, stop: int, access: Access) -> None:
        index, last = self._range(start, stop)
        at = start
        while at < stop:
            if index < last and self._spans[index].start == at:
                span = self._spans[index]
            else:  # bytes without a history
                end = self._spans[index].start if index < last else stop
                span = _Span(at, end)
                self._put(index, span)
                last += 1
            span.read[access.agent.number] = access
            at, index = span.stop, index + 1

    def forget(self, start: int, stop: int) -> None:
        first, last = self._range(start, stop)
        del self._starts[first:last]
        del self._spans[first:last]


class Order:
    """Agents, what they know of each other, and the memory they share. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.races: dict[Race, int] = {}  # how often each
        self.accesses = 0
        self._agents = 0
        self._shadow = Shadow()
        self._threads: dict[threading.Thread, Agent] = {}

    # ---------------------------------------------------------------- agents
    def agent(self, name: str) -> Agent:
        with self.lock:
            self._agents += 1
            return Agent(name, self._agents)

    def of_thread(self, thread: threading.Thread | None = None) -> Agent:
        """The agent of a thread, by default of this one."""
        thread = threading.current_thread() if thread is None else thread
        with self.lock:
            found = self._threads.get(thread)
            if found is None:
                found = self._threads[thread] = self.agent(f"thread {thread.name}")
            return found

    def learn(self, clock: Clock) -> None:
        with self.lock:
            self.of_thread().learn(clock)

    def tell(self) -> Clock:
        with self.lock:
            return self.of_thread().tell()

    # ---------------------------------------------------------------- accesses
    def access(self, agent: Agent, start: int, stop: int, what: str, *, write: bool) -> None:
        """`agent` reads or writes the bytes `[start, stop)` now."""
        if start == stop:
            return
        with self.lock:
            self.accesses += 1
            access = Access(agent, agent.clock[agent.number], f"{what} at {_place()}")
            self._compare(agent.clock, start, stop, str(access), write=write)
            if write:
                self._shadow.wrote(start, stop, access)
            else:
                self._shadow.was_read(start, stop, access)

    def check(self, clock: Clock, start: int, stop: int, what: str) -> None:
        """Check that an agent whose clock is `clock` may overwrite the bytes."""
        with self.lock:
            self._compare(clock, start, stop, f"{what}, given up at {_place()}", write=True)

    def _compare(self, clock: Clock, start: int, stop: int, what: str, *, write: bool) -> None:
        for span in self._shadow.over(start, stop):
            for kind, access in span.unordered(clock, write=write):
                race = Race(f"{kind} by {access}", f"{'write' if write else 'read'} by {what}")
                self.races[race] = self.races.get(race, 0) + 1

    def forget(self, start: int, stop: int) -> None:
        """The bytes are other memory from here on."""
        with self.lock:
            self._shadow.forget(start, stop)

    def report(self) -> str:
        return "\n".join(f"{count} x {race}" for race, count in self.races.items())


def _place() -> str:
    """The innermost line of offload or its tests, these tools excepted."""
    frame = sys._getframe(2)
    while frame is not None:
        if _is_traced(frame.f_code.co_filename):
            return f"{'/'.join(frame.f_code.co_filename.rsplit('/', 2)[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@cache
def _is_traced(path: str) -> bool:
    return any(part in path for part in _TRACED) and not path.endswith(_TOOLS)
