"""How links spend their time: every second is busy, stalled or idle, and never two of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.swap.device.streams import CopyStream
from offload.swap.io.io_request import Priority
from offload.swap.io.threads_backend import ThreadsBackend
from offload.swap.threads import link_use
from offload.swap.threads.link_use import CopyTimes, LinkMeter
from offload.swap.threads.transfer import Transfer
from offload.tiers import accelerator
from offload.tiers.errors import ChecksumError, TierFullError
from offload.tiers.tier import PAGE_NBYTES
from tests.swap.stream_simulation import CUDA, World

TIMEOUT_S = 30.0


class Clock:
    """Stands until it is set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.reads = 0
        patch.setattr(link_use.time, "perf_counter", self.read)

    def read(self) -> float:
        self.reads += 1
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def seconds(used: Any) -> tuple[float, float, float]:
    return used.busy_s, used.stalled_s, used.idle_s


# ---------------------------------------------------------------- what is counted
def test_seconds_are_busy_or_stalled_or_idle(clock: Clock) -> None:
    meter = LinkMeter()
    for asked, moving in ((1, 0), (0, 1), (1, 1), (-1, -1), (0, -1), (-1, 0), (1, 0), (-1, 0)):
        clock.now_s += 1
        meter.note(asked=asked, moving=moving)
    clock.now_s += 1
    # idle 1, stalled 1, busy 3, stalled 1, idle 1, stalled 1, idle 1
    assert seconds(meter.use()) == (3.0, 3.0, 3.0)
    clock.now_s += 1
    assert seconds(meter.use()) == (3.0, 3.0, 4.0)  # until now


def test_a_clock_is_read_only_where_the_first_comes_or_the_last_goes(clock: Clock) -> None:
    meter = LinkMeter()
    before = clock.reads
    meter.note(asked=1)
    meter.note(moving=1)
    for _ in range(1000):
        meter.note(asked=1)
        meter.note(moving=1)
        meter.note(asked=-1, moving=-1)
    meter.note(asked=-1, moving=-1)
    assert clock.reads - before == 3


# ---------------------------------------------------------------- files
@dataclass
class Held:
    """A backend of one thread, whose calls and callbacks wait until the test lets them go on."""

    backend: ThreadsBackend
    clock: Clock
    begun: threading.Semaphore
    go_on: threading.Semaphore

    def spend(self, seconds_: float) -> tuple[float, float, float]:
        """What was counted for so many seconds of now."""
        before = seconds(self.backend.use())
        self.clock.now_s += seconds_
        now = seconds(self.backend.use())
        found = [after - was for was, after in zip(before, now, strict=True)]
        return found[0], found[1], found[2]

    def hold(self) -> None:
        self.begun.release()
        assert self.go_on.acquire(timeout=TIMEOUT_S)

    def submit(self, write: bool = False, nbytes: int = PAGE_NBYTES, **hooks: Any) -> Transfer[Any]:
        buffer = memoryview(bytearray(nbytes))
        submit = self.backend.submit_write if write else self.backend.submit_read
        return submit(0, buffer, 0, path="p", priority=Priority.NORMAL, **hooks)


@pytest.fixture
def held(clock: Clock) -> Any:
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)
    found: list[Held] = []

    def call(fd: int, buffers: Any, offset: int) -> int:
        found[0].hold()
        return len(buffers[0])

    with ThreadsBackend(workers=1, preadv=call, pwritev=call) as backend:
        found.append(Held(backend, clock, begun, go_on))
        yield found[0]


def test_a_link_is_busy_from_call_to_call_and_idle_without_requests(held: Held) -> None:
    assert held.spend(1) == (0, 0, 1)
    reads = [held.submit(), held.submit()]
    assert held.begun.acquire(timeout=TIMEOUT_S)
    assert held.spend(2) == (2, 0, 0)
    held.go_on.release()
    assert held.begun.acquire(timeout=TIMEOUT_S)  # the second one's
    assert held.spend(2) == (2, 0, 0)
    held.go_on.release()
    for read in reads:
        read.wait(TIMEOUT_S)
    assert held.spend(3) == (0, 0, 3)


def test_what_comes_before_a_write_stalls_and_what_comes_after_a_read_does_not(held: Held) -> None:
    write = held.submit(write=True, before=held.hold)
    assert held.begun.acquire(timeout=TIMEOUT_S)
    assert held.spend(1) == (0, 1, 0)  # its checksum is computed, and the disk could write
    held.go_on.release(2)
    write.wait(TIMEOUT_S)
    assert held.begun.acquire(timeout=TIMEOUT_S)
    read = held.submit(after=held.hold)
    assert held.begun.acquire(timeout=TIMEOUT_S)
    held.go_on.release()
    assert held.begun.acquire(timeout=TIMEOUT_S)
    assert held.spend(1) == (0, 0, 1)  # all bytes are there
    held.submit()  # the thread is with the other one
    assert held.spend(1) == (0, 1, 0)
    held.go_on.release(2)
    read.wait(TIMEOUT_S)


def test_a_request_that_fails_leaves_nothing_behind(held: Held) -> None:
    def fails() -> None:
        raise ChecksumError("no")

    failing = held.submit(write=True, nbytes=64 << 20, before=fails)
    with suppress(ChecksumError):
        failing.wait(TIMEOUT_S)
    with pytest.raises(ValueError, match="empty"):
        held.submit(nbytes=0)
    assert held.spend(1) == (0, 0, 1)
    held.go_on.release(4)  # of 64 MiB, in four pieces
    held.submit(nbytes=64 << 20).wait(TIMEOUT_S)
    assert held.spend(1) == (0, 0, 1)


def test_a_write_that_waits_for_room_is_work_that_waits(
    clock: Clock, make_bench: Any, pages: Callable[..., memoryview], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """For that of a version which is freed already, and whose bytes are just being checked."""
    checks, go_on = threading.Event(), threading.Event()
    store = make_bench(tmp_path, budget_nbytes=PAGE_NBYTES).store
    monkeypatch.setattr(store, "_verify", lambda *_: checks.set() or go_on.wait(TIMEOUT_S))
    store.write(pages(PAGE_NBYTES), owner="a", state_class="parameters").wait(TIMEOUT_S)
    (record,) = store._records.values()
    read = store.read(record.block, pages(PAGE_NBYTES))
    assert checks.wait(TIMEOUT_S)
    store.free(record.block)
    with pytest.raises(TierFullError):
        store.write(pages(PAGE_NBYTES), owner="a", state_class="parameters")
    before = store.backend.use()
    clock.now_s += 1
    assert store.backend.use().idle_s == before.idle_s + 1  # nobody waits yet
    waits = threading.Thread(target=store.await_room)
    waits.start()
    began_s = time.monotonic()
    while not store._waiting:
        assert time.monotonic() - began_s < TIMEOUT_S
    with store._lock:  # it lets go of that when it is counted
        before = store.backend.use()
    clock.now_s += 1
    assert store.backend.use().stalled_s == before.stalled_s + 1
    go_on.set()
    waits.join(TIMEOUT_S)
    read.wait(TIMEOUT_S)
    before = store.backend.use()
    clock.now_s += 1
    assert store.backend.use().idle_s == before.idle_s + 1


# ---------------------------------------------------------------- copies
class Timed:
    """An event of a device, done from `at_ms` on."""

    def __init__(self, at_ms: float, now: Any) -> None:
        self.at_ms, self._now = at_ms, now

    def query(self) -> bool:
        return bool(self.at_ms <= self._now.ms)

    def elapsed_time(self, end: Timed) -> float:
        assert self.query()
        assert end.query()
        return end.at_ms - self.at_ms


def test_a_copy_counts_once_it_has_ended() -> None:
    now, times = SimpleNamespace(ms=0.0), CopyTimes(CUDA)
    times._opened_s -= 60.0
    for start, stop in ((0, 10), (12, 15), (13, 20)):
        times.add(Timed(start, now), Timed(stop, now))
    found = []
    for now.ms in (5, 14, 15, 30):
        found.append(times.use().busy_s * 1e3)
    assert found == pytest.approx([0, 10, 13, 20])
    assert not times._copies


def test_few_copies_are_kept_when_nobody_asks() -> None:
    now, times = SimpleNamespace(ms=0.0), CopyTimes(CUDA)
    for number in range(1000):
        now.ms = number
        times.add(Timed(number - 1, now), Timed(number, now))
        assert len(times._copies) < 64
    used = times.use()
    assert used.stalled_s is None
    assert used.seconds().keys() == {"busy", "idle"}


def test_copies_of_a_stream_are_timed_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, eager_model=True)
    order: list[str] = []
    monkeypatch.setattr(
        accelerator.KINDS["cuda"], "event",
        lambda device, *, timing=False: _Told(order, "time" if timing else "mark"),
    )  # fmt: skip
    monkeypatch.setattr("offload.swap.device.streams._start", lambda *_: order.append("copy"))
    source, there = torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    CopyStream(CUDA, CopyTimes(CUDA)).copy(there, source, after=[])
    assert order == ["time", "copy", "time", "mark"]
    order.clear()
    CopyStream(CUDA).copy(there, source, after=[])  # nobody wants to know
    assert order == ["copy", "mark"]
    assert world.streams


class _Told:
    def __init__(self, order: list[str], what: str) -> None:
        self._order, self._what = order, what

    def record(self, stream: Any = None) -> None:
        self._order.append(self._what)
