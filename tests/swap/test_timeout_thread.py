"""Calls of the system that do not return are given up with an error that names them."""

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from offload.errors import StuckError
from offload.swap.io import timeout_thread
from offload.swap.io.timeout_thread import TimeoutThread
from tests.offload.interrupt_points import at_point, counted_points

SOON_S = 10.0  # at most, for what another thread does at once


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """Opening it really waits in the kernel, until it is opened for writing."""
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def opening(fifo: Path) -> TimeoutThread[int]:
    return TimeoutThread("opening", fifo, os.open, fifo, os.O_RDONLY)


def release(fifo: Path, call: TimeoutThread[Any]) -> None:
    os.close(os.open(fifo, os.O_RDWR))
    call.join(SOON_S)
    assert not call.is_alive()


def test_a_call_gives_its_result_or_its_error(tmp_path: Path) -> None:
    assert TimeoutThread("listing", tmp_path, os.listdir, tmp_path).result(SOON_S) == []
    with pytest.raises(FileNotFoundError):
        TimeoutThread("listing", tmp_path, os.listdir, tmp_path / "none").result(SOON_S)


def test_a_call_that_stays_in_the_kernel_is_named_and_given_up(
    fifo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    call, done = opening(fifo), threading.Event()
    with caplog.at_level(logging.WARNING), pytest.raises(StuckError) as caught:
        call.result(0.05)
    assert f"opening {fifo} has not ended for" in str(caught.value)
    assert caught.value.seconds >= 0.05
    assert caught.value.path == str(fifo)
    assert "not ended for" in caplog.text
    assert call.when_returned(done.set)
    assert not done.is_set()
    release(fifo, call)
    assert done.wait(SOON_S)
    assert not call.when_returned(done.set)


def test_a_ctrl_c_ends_the_wait_for_a_call_that_is_stuck(
    fifo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeout_thread, "_PATIENCE_S", 0.05)
    main = threading.main_thread().ident
    assert main is not None

    def opened() -> int:
        signal.pthread_kill(main, signal.SIGINT)
        return os.open(fifo, os.O_RDONLY)

    call = TimeoutThread("opening", fifo, opened)
    with pytest.raises(KeyboardInterrupt):
        call.result(1e6)
    assert not call.has_returned
    release(fifo, call)


def test_a_ctrl_c_comes_when_a_call_that_is_under_way_has_returned(tmp_path: Path) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def made() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        os.mkdir(tmp_path / "made")

    with pytest.raises(KeyboardInterrupt):
        TimeoutThread("making", tmp_path, made).result(SOON_S)
    assert os.listdir(tmp_path) == ["made"]


# Python drops what is raised in a finaliser
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_ctrl_c_at_any_point_of_a_call_is_a_ctrl_c_that_does_not_hang(tmp_path: Path) -> None:
    def asked() -> None:
        TimeoutThread("asking", tmp_path, os.stat, tmp_path).result(SOON_S)

    with counted_points() as count:
        asked()
    interrupted = 0
    for number in range(1, count()):
        began = time.monotonic()
        try:
            with at_point(number):
                asked()
        except KeyboardInterrupt:
            interrupted += 1
        assert time.monotonic() - began < timeout_thread._PATIENCE_S, number
    assert interrupted > count() // 2


def test_where_no_thread_can_be_started_the_caller_makes_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)
    found = TimeoutThread("asking", tmp_path, threading.current_thread).result(SOON_S)
    assert found is threading.current_thread()
