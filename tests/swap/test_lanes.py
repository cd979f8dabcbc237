"""Waits are counted for what is waited for, in threads whose waiting holds up training."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.swap.device.streams import StreamEvent
from offload.swap.io.threads_backend import ThreadsBackend
from offload.swap.threads import lanes
from offload.swap.threads.lanes import Lane, WaitFor, waits_s
from offload.swap.threads.transfer import Transfer, all_of
from offload.swap.threads.worker import Worker
from offload.tiers.errors import StorageError

SLOW_S = 0.02


def ended_by(after_s: float, lane: Lane) -> Transfer[int]:
    pending: Transfer[int] = Transfer("x", lane)
    threading.Timer(after_s, pending.complete, [1]).start()
    return pending


def assert_waits(lane: Lane, wait: Callable[[float], object]) -> None:
    """`wait(after_s)` waits for what ends after so long: on a busy machine that may be over before
    the wait begins."""
    before = lane.waited_s
    assert any(wait(after_s) and lane.waited_s > before for after_s in (SLOW_S, 0.5, 5.0))


def test_a_wait_is_counted_for_the_lane_of_the_transfer() -> None:
    files, update = Lane(WaitFor.FILES), Lane(WaitFor.UPDATE)
    began = time.perf_counter()
    assert_waits(files, lambda after_s: ended_by(after_s, files).wait())
    took = time.perf_counter() - began
    assert 0 < files.waited_s <= took
    assert waits_s([files, update]) == {
        "nvme": files.waited_s, "link": 0.0, "update": 0.0, "ranks": 0.0,
    }  # fmt: skip


def test_what_is_there_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_clock() -> float:
        raise AssertionError("a clock is read")

    done: Transfer[int] = Transfer("x", Lane(WaitFor.FILES))
    done.complete(1)
    monkeypatch.setattr(lanes.time, "perf_counter", read_clock)
    assert done.wait() == 1


def test_waits_for_what_is_made_of_a_transfer_are_its_own() -> None:
    lane = Lane(WaitFor.LINK)
    assert_waits(lane, lambda after_s: ended_by(after_s, lane).wait())
    assert_waits(lane, lambda s: all_of([Transfer.completed(0), ended_by(s, lane)]).wait())


def test_a_wait_that_fails_or_times_out_counts() -> None:
    lane = Lane(WaitFor.FILES)
    pending: Transfer[int] = Transfer("x", lane)
    with pytest.raises(StorageError, match="not ended"):
        pending.wait(SLOW_S)
    assert lane.waited_s >= SLOW_S * 0.9
    before = lane.waited_s
    threading.Timer(SLOW_S, pending.fail, [ValueError("gone")]).start()
    with pytest.raises(ValueError, match="gone"):
        pending.wait()
    assert lane.waited_s > before


def test_a_worker_may_wait_for_as_long_as_it_likes() -> None:
    lane, ended = Lane(WaitFor.FILES), threading.Event()

    def work() -> bool:
        ended_by(SLOW_S, lane).wait()
        ended.set()
        return False

    worker = Worker("test", work, lambda error: None)
    worker.wake()
    assert ended.wait(10)
    worker.close()
    assert lane.waited_s == 0.0


def test_a_slow_file_is_waited_for(tmp_path: Path, make_bench: Any, pages: Any) -> None:
    def slow(fd: int, buffers: Any, offset: int) -> int:
        time.sleep(SLOW_S)
        return os.preadv(fd, buffers, offset)

    bench = make_bench(tmp_path, backend=ThreadsBackend(preadv=slow))
    block = bench.store.write(pages(4096), owner="a", state_class="parameters").wait()
    before = bench.store.backend.lane.waited_s
    bench.store.read(block, pages(4096)).wait()
    assert bench.store.backend.lane.waited_s - before >= SLOW_S * 0.5


class _Event:
    """Of work that takes a while. It is not asked whether it is done: a driver's call, too."""

    def synchronize(self) -> None:
        time.sleep(SLOW_S)


def test_a_copy_that_is_under_way_is_waited_for_on_its_link() -> None:
    lane = Lane(WaitFor.LINK)
    mark: Callable[..., StreamEvent] = lambda event: StreamEvent(event, lane=lane)  # noqa: E731
    mark(_Event()).wait()
    assert lane.waited_s >= SLOW_S * 0.9
