"""Calls of the system that do not return: given up with an error that names them, and nothing that
they may still touch is used for anything else."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.checkpoint import hands, locks
from offload.checkpoint.disk import OpenFile, new_file
from offload.checkpoint.hands import Call, Hand, patiently, when_returned
from offload.checkpoint.locks import alone_in, lock_folder, unlock
from offload.errors import CheckpointError, NoSpaceError, StorageError, StuckError
from tests.offload.engine_cases import (
    TinyLM,
    assert_same_bits,
    batches,
    config,
    losses_of,
    seeded,
    states_of,
)
from tests.offload.interrupt_points import after_us, at_point, counted_points

SOON_S = 10.0  # at most, for what another thread does at once


@contextmanager
def soon(**others: float) -> Iterator[None]:
    """What is stuck inside stays so until a test ends it: there is no need to wait for long."""
    times = {"TIMEOUT_S": 0.05, "_WARN": 0.4, "_LOOK_S": 0.01, "_PATIENCE_S": 0.05}
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in {**times, **others}.items():
            patch.setattr(hands, name, seconds)
        yield


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """Opening it really waits in the kernel, until somebody opens it to write."""
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def release(fifo: Path) -> None:
    os.close(os.open(fifo, os.O_RDWR))


def ended(condition: Callable[[], bool]) -> bool:
    """Waits for it."""
    tick = threading.Event()
    return any(condition() or tick.wait(0.005) for _ in range(int(SOON_S / 0.005)))


class Gate:
    """A call that waits here is in the kernel, as far as anybody else can see."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self._function = function

    def __call__(self, *args: Any) -> Any:
        self.entered.set()
        assert self.opened.wait(SOON_S)
        return self._function(*args)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Gate]]:
    made: list[Gate] = []

    def gate(name: str) -> Gate:
        made.append(Gate(getattr(os, name)))
        monkeypatch.setattr(os, name, made[-1])
        return made[-1]

    yield gate
    for each in made:
        each.opened.set()
    assert ended(lambda: not hands._left)


def test_a_call_gives_its_result_or_its_error(tmp_path: Path) -> None:
    assert patiently("listing", tmp_path, os.listdir, tmp_path) == []
    with pytest.raises(FileNotFoundError):
        patiently("listing", tmp_path, os.listdir, tmp_path / "none")
    assert "offload-checkpoint-call" not in [each.name for each in threading.enumerate()]


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


def test_of_a_file_with_a_stuck_call_nothing_is_used_again(
    tmp_path: Path, gate: Callable[[str], Gate]
) -> None:
    file = new_file(tmp_path / "file")
    pwrite = gate("pwrite")
    with soon(), pytest.raises(StuckError) as caught:
        file.write_all(memoryview(b"12345678"), 4)
    assert (caught.value.offset_bytes, caught.value.nbytes) == (4, 8)
    with pytest.raises(StuckError, match="pwrite"):
        file.sync()
    fd = file.fd
    file.close()  # does not wait
    os.fstat(fd)  # not another file's, as long as the call may use it
    pwrite.opened.set()
    assert ended(lambda: not hands._left)
    assert ended(lambda: file.fd < 0)


def test_a_read_that_returns_late_changes_no_memory_of_the_callers(
    tmp_path: Path, gate: Callable[[str], Gate]
) -> None:
    (tmp_path / "file").write_bytes(b"late")
    buffer = bytearray(4)
    with OpenFile("open", tmp_path / "file", tmp_path / "file", os.O_RDONLY) as file:
        preadv = gate("preadv")
        with soon(), pytest.raises(StuckError):
            file.read_all(memoryview(buffer), 0)
        preadv.opened.set()
        assert ended(lambda: not hands._left)
    assert buffer == bytes(4)


def test_a_lock_is_kept_while_a_rename_below_it_may_still_come(
    tmp_path: Path, gate: Callable[[str], Gate]
) -> None:
    (tmp_path / "old").mkdir()
    rename = gate("rename")
    with pytest.raises(StuckError), alone_in(tmp_path), soon():
        patiently("rename", tmp_path / "new", lambda: os.rename(tmp_path / "old", tmp_path / "new"))
    with pytest.raises(BlockingIOError):
        lock_folder(tmp_path)
    rename.opened.set()
    assert ended(lambda: not hands._left)
    with alone_in(tmp_path):
        assert os.listdir(tmp_path) == ["new"]


def test_a_lock_that_a_stopped_process_keeps_is_an_error_within_half_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]

    def later(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr(locks.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(locks.time, "sleep", later)
    monkeypatch.setattr(locks, "POLL_S", 0.5)
    holder = lock_folder(tmp_path)
    with pytest.raises(CheckpointError, match="another process has locked"), alone_in(tmp_path):
        raise AssertionError("it is locked")
    assert 20 < now_s[0] < 30
    unlock(holder)


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


def test_what_a_full_device_says_is_said() -> None:
    full = Path("/dev/full")
    with OpenFile("open", full, full, os.O_WRONLY) as file, pytest.raises(NoSpaceError):
        file.write_all(memoryview(b"1"), 0)


def test_a_forked_child_closes_its_own_descriptor(tmp_path: Path) -> None:
    with new_file(tmp_path / "file") as file:
        pid = os.fork()
        if not pid:
            file.close()
            os._exit(0 if file.fd < 0 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        file.write_all(memoryview(b"parent"), 0)
    assert (tmp_path / "file").read_bytes() == b"parent"


def test_a_call_that_has_not_begun_is_taken_back_by_a_ctrl_c(tmp_path: Path, fifo: Path) -> None:
    hand = Hand()
    first = Call("open", fifo, os.open, (fifo, os.O_RDONLY), 0, 0)
    second = Call("mkdir", tmp_path, os.mkdir, (tmp_path / "made",), 0, 0)
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
def test_a_ctrl_c_at_any_point_of_calls_is_a_ctrl_c_and_is_waited_for_by_nothing(
    tmp_path: Path,
) -> None:
    def calls() -> None:
        patiently("stat", tmp_path, os.stat, tmp_path)
        path = tmp_path / f"file-{secrets.token_hex(4)}"
        with new_file(path) as file:
            file.write_all(memoryview(b"1"), 0)

    with counted_points() as count:
        calls()
    interrupted = 0
    for number in range(1, count()):
        began = time.monotonic()
        try:
            with at_point(number):
                calls()
        except KeyboardInterrupt:
            interrupted += 1
        assert time.monotonic() - began < hands._PATIENCE_S, number
    assert interrupted > count() // 2
    assert not hands._left  # of which locks would wait
    calls()


def saved(engine: offload.Engine, path: Path, *, wait: bool) -> None:
    engine.save_checkpoint(path, wait=wait)
    engine.checkpoint_saved()


def test_where_no_thread_can_be_started_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [0]
    start = threading.Thread.start

    def started(self: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(self)

    with offload.initialize(seeded(TinyLM), config(tmp_path)) as engine:
        losses_of(engine, batches(1))
        engine.save_checkpoint(tmp_path / "saved")
        before = states_of(engine)
        monkeypatch.setattr(threading.Thread, "start", started)
        for threads in range(0, 60, 3):
            for wait in (True, False):
                left[0] = threads
                with pytest.raises(StorageError, match="no thread can be started; raise the limit"):
                    saved(engine, tmp_path / "saved", wait=wait)
        left[0] = 20
        with pytest.raises(StorageError, match="no thread can be started; raise the limit"):
            engine.load_checkpoint(tmp_path / "saved")
        monkeypatch.undo()
        engine.load_checkpoint(tmp_path / "saved")
        assert_same_bits(states_of(engine), before)
        engine.save_checkpoint(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_child_that_was_forked_amid_a_call_makes_its_own(tmp_path: Path) -> None:
    with hands._books:  # as another thread might
        pid = os.fork()
        if not pid:
            signal.alarm(int(SOON_S))  # its default ends the child
            patiently("mkdir", tmp_path, os.mkdir, tmp_path / "made")
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "made").is_dir()
