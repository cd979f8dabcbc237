"""Calls of the system that do not return are given up with an error that names them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from offload.errors import StuckError
from offload.swap.io import hands
from offload.swap.io.hands import Call, Hand, patiently, when_returned
from tests.offload.interrupt_points import after_us, at_point, counted_points
from tests.stuck_calls import HAND, SOON_S, Gate, ended, soon

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """Opening it really waits in the kernel, until somebody opens it to write."""
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def release(fifo: Path) -> None:
    os.close(os.open(fifo, os.O_RDWR))


def test_a_call_gives_its_result_or_its_error(tmp_path: Path) -> None:
    assert patiently("listing", tmp_path, os.listdir, tmp_path) == []
    with pytest.raises(FileNotFoundError):
        patiently("listing", tmp_path, os.listdir, tmp_path / "none")
    assert HAND not in [each.name for each in threading.enumerate()]


def test_a_call_that_stays_in_the_kernel_is_named_and_given_up(
    fifo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), soon(), pytest.raises(StuckError) as caught:
        patiently("open", fifo, os.open, fifo, os.O_RDONLY)
    assert f"open of {fifo} has not ended for" in str(caught.value)
    assert caught.value.seconds >= 0.05
    assert caught.value.path == str(fifo)
    assert "not ended for" in caplog.text
    release(fifo)
    assert ended(lambda: not hands._left)


def test_what_others_may_not_see_waits_for_the_call(fifo: Path) -> None:
    done = threading.Event()
    assert not when_returned(done.set, fifo.parent)
    with soon(), pytest.raises(StuckError):
        patiently("open", fifo, os.open, fifo, os.O_RDONLY)
    assert when_returned(done.set, fifo.parent)
    assert not when_returned(done.set, fifo.parent / "other")
    assert not done.is_set()
    release(fifo)
    assert done.wait(SOON_S)


def test_a_ctrl_c_ends_the_wait_for_a_call_that_is_stuck(fifo: Path) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def opened() -> int:
        signal.pthread_kill(main, signal.SIGINT)
        return os.open(fifo, os.O_RDONLY)

    with soon(TIMEOUT_S=1e6), pytest.raises(KeyboardInterrupt):
        patiently("open", fifo, opened)
    assert hands._left
    release(fifo)
    assert ended(lambda: not hands._left)


def test_a_ctrl_c_comes_when_a_call_that_is_under_way_has_returned(tmp_path: Path) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def renamed() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        os.mkdir(tmp_path / "made")

    with pytest.raises(KeyboardInterrupt):
        patiently("mkdir", tmp_path, renamed)
    assert os.listdir(tmp_path) == ["made"]
    assert not hands._left


def test_what_waits_for_two_calls_is_done_once_when_the_last_has_returned(tmp_path: Path) -> None:
    gates, done = [Gate(int), Gate(int)], []
    for gate in gates:
        with soon(), pytest.raises(StuckError):
            patiently("call", tmp_path, gate)
    assert when_returned(lambda: done.append(hands.hand_call()), tmp_path)
    for gate in gates:
        assert not done
        count = len(hands._left)
        gate.opened.set()
        assert ended(lambda count=count: len(hands._left) < count)
    assert len(done) == 1


def test_a_forked_child_waits_for_no_call_of_its_parent(fifo: Path) -> None:
    with soon(), pytest.raises(StuckError):
        patiently("open", fifo, os.open, fifo, os.O_RDONLY)
    pid = os.fork()
    if not pid:
        is_waiting = when_returned(print, fifo)
        os._exit(1 if is_waiting or patiently("listing", fifo, os.listdir, "/") == [] else 0)
    assert os.waitpid(pid, 0)[1] == 0
    assert hands._left
    release(fifo)
    assert ended(lambda: not hands._left)


def test_where_no_thread_can_be_started_the_caller_makes_the_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert patiently("thread", tmp_path, threading.current_thread) is threading.current_thread()
    with pytest.raises(FileNotFoundError):
        patiently("listing", tmp_path, os.listdir, tmp_path / "none")
    hand = Hand()
    calls = [Call("mkdir", tmp_path, os.mkdir, tmp_path / name) for name in ("a", "a")]
    for call in calls:
        hand.ask(call)
    hand.result(calls[0])
    with pytest.raises(FileExistsError):
        hand.result(calls[1])
    hand.end()


@pytest.mark.parametrize("is_made_before", [True, False])
def test_a_call_is_made_as_python_ends(is_made_before: bool, tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from offload.swap.io.hands import Call, Hand
class Last:
    def __init__(self):
        self.path = sys.argv[1]
        self.hand = Hand() if sys.argv[2] else None
        if self.hand:
            self.hand.make("stat", Path("."), os.stat, ".")
    def __del__(self, sys=sys, Hand=Hand, Call=Call, mkdir=os.mkdir):
        assert sys.is_finalizing()
        hand = self.hand or Hand()
        hand.result(Call("mkdir", self.path, mkdir, self.path))
        hand.end()
last = Last()
"""
    command = [sys.executable, "-c", code, str(tmp_path / "made"), "x" * is_made_before]
    done = subprocess.run(command, cwd=REPOSITORY, timeout=60, check=True, capture_output=True)
    assert not done.stderr
    assert (tmp_path / "made").is_dir()


def test_a_call_that_has_not_begun_is_taken_back_by_a_ctrl_c(tmp_path: Path, fifo: Path) -> None:
    hand = Hand()
    first = Call("open", fifo, os.open, fifo, os.O_RDONLY)
    second = Call("mkdir", tmp_path, os.mkdir, tmp_path / "made")
    hand.ask(first)
    hand.ask(second)
    with after_us(1000), pytest.raises(KeyboardInterrupt):
        hand.result(second)
    release(fifo)
    os.close(hand.result(first))
    hand.end()
    assert not (tmp_path / "made").exists()
    assert not hands._left


# Python drops what is raised in a finaliser
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_ctrl_c_at_any_point_of_a_call_is_a_ctrl_c_and_leaves_nothing_to_wait_for(
    tmp_path: Path,
) -> None:
    with counted_points() as count:
        patiently("stat", tmp_path, os.stat, tmp_path)
    interrupted = 0
    for number in range(1, count()):
        began = time.monotonic()
        try:
            with at_point(number):
                patiently("stat", tmp_path, os.stat, tmp_path)
        except KeyboardInterrupt:
            interrupted += 1
        assert time.monotonic() - began < hands._PATIENCE_S, number
    assert interrupted > count() // 2
    assert not hands._left  # of which locks would wait
    patiently("stat", tmp_path, os.stat, tmp_path)
