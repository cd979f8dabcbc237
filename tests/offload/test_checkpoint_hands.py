"""Calls for checkpoints that do not return: nothing that they may still touch is used for anything
else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload.checkpoint.format import locks
from offload.checkpoint.format.disk import OpenFile, new_file
from offload.checkpoint.format.locks import alone_in, lock_folder, unlock
from offload.errors import CheckpointError, NoSpaceError, StuckError
from offload.swap.io import hands
from offload.swap.io.hands import patiently
from tests.stuck_calls import Gate, ended, soon


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
