"""Calls on a checkpoint's files: one that does not return is named, and what a descriptor is worth
after it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from offload.checkpoint.format import disk
from offload.checkpoint.format.disk import OpenFile, new_file, rename
from offload.checkpoint.format.manifest import MANIFEST, OPTIMIZER, PARAMETERS
from offload.errors import NoSpaceError
from tests.offload.engine_cases import TinyLM, seeded
from tests.offload.plain_training import MakeEngine


def test_a_call_that_does_not_return_is_named_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    named = threading.Event()
    monkeypatch.setattr(disk, "_watchdog", disk._Watchdog())
    monkeypatch.setattr(disk._Watchdog, "WARN_AFTER_S", 0.1)
    monkeypatch.setattr(disk._log, "warning", lambda *said: (warned.append(said), named.set()))
    warned: list[tuple[object, ...]] = []
    (tmp_path / "old").touch()
    renamed = os.rename

    def hangs(old: Path, new: Path) -> None:
        assert named.wait(10)
        renamed(old, new)

    monkeypatch.setattr(os, "rename", hangs)
    rename(tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "new").exists()
    ((text, operation, path, seconds),) = warned
    assert (operation, path) == ("rename", tmp_path / "new")
    assert "has not ended" in str(text)
    assert float(str(seconds)) >= 0.1


def test_a_call_whose_end_an_interrupt_left_out_is_not_watched_any_longer() -> None:
    before, watchdog = set(threading.enumerate()), disk._Watchdog()
    watchdog.began("sync", Path("file"))  # without `ended`
    (thread,) = set(threading.enumerate()) - before
    watchdog.began("stat", Path("file"))  # the thread's next call
    watchdog.ended()
    thread.join(10)
    assert not thread.is_alive()


def test_an_interrupt_leaves_no_watch_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def interrupted(thread: threading.Thread) -> None:
        signal.raise_signal(signal.SIGINT)
        start(thread)
        started.append(thread)

    monkeypatch.setattr(disk, "_watchdog", disk._Watchdog())
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        disk.make_call("sync", Path("file"), int)
    (thread,) = started
    thread.join(10)
    assert not thread.is_alive()


def test_a_full_device_is_an_error_of_its_kind() -> None:
    full = Path("/dev/full")
    with OpenFile(full, os.O_WRONLY) as file, pytest.raises(NoSpaceError):
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


def test_a_file_that_is_open_when_the_program_ends_does_not_keep_it() -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from offload.checkpoint.format.disk import OpenFile\n"
        "kept = OpenFile(Path(sys.executable), 0)\n"  # closed while modules are torn down
        "time.sleep(0.5)\n"  # by then no thread watches any longer
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_file_is_durable_before_a_manifest_names_it(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calls = make(seeded(TinyLM)), list[tuple[str, str]]()

    def perform(operation: str, path: Path, function: Callable[..., Any], *args: Any) -> Any:
        calls.append((operation, path.name if path.name == MANIFEST else path.parent.name))
        return function(*args)

    monkeypatch.setattr(disk, "perform", perform)
    engine.save_checkpoint(tmp_path / "saved")
    before = calls[: calls.index(("create", MANIFEST))]
    made = [where for operation, where in before if operation == "create"]
    assert PARAMETERS in made
    assert OPTIMIZER in made
    assert sorted(made) == sorted(where for operation, where in before if operation == "fsync")


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSPC])
def test_room_is_reserved_where_the_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fails(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    with new_file(tmp_path / "file") as file:
        file.reserve(1 << 20)
        assert file.status().st_blocks * 512 >= 1 << 20
        monkeypatch.setattr(disk, "fallocate", fails)
        with pytest.raises(NoSpaceError) if number == errno.ENOSPC else nullcontext():
            file.reserve(2 << 20)
