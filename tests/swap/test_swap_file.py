import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.swap.io import swap_file
from offload.swap.io.swap_file import SwapFile, check_directory, file_system_of
from offload.tiers.errors import NoSpaceError, PathError, StorageError, StuckError
from offload.tiers.tier import PAGE_NBYTES
from tests.stuck_calls import all_ended, give_up_this_call

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def refuse(monkeypatch: pytest.MonkeyPatch, function: str, number: int) -> None:
    def refusing(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(swap_file, function, refusing)


def test_a_directory_is_made_private_or_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = check_directory(tmp_path / "new")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert report.free_nbytes > 0
    with pytest.raises(PathError, match="is the drive mounted"):
        check_directory(tmp_path / "missing" / "new")
    with pytest.raises(PathError, match="free"):
        check_directory(tmp_path, needed_nbytes=1 << 60)
    tmp_path.chmod(0o777)
    with pytest.raises(PathError, match="sticky bit"):
        check_directory(tmp_path)
    tmp_path.chmod(0o1777)
    check_directory(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write anywhere
    with pytest.raises(PathError, match="not writable"):
        check_directory(tmp_path)


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_file_has_no_name_and_is_private(
    directory: Path, monkeypatch: pytest.MonkeyPatch, unnamed: bool, no_leak: None
) -> None:
    if not unnamed:  # a flag that makes open fail where O_TMPFILE is not known
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)
    with SwapFile(directory) as file:
        assert list(directory.iterdir()) == []
        status = os.fstat(file.fd)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_nlink == 0
        file.reserve(PAGE_NBYTES)


def test_reserved_bytes_are_on_the_device_and_never_shrink(directory: Path) -> None:
    with SwapFile(directory) as file:
        file.reserve(3 << 20)
        file.reserve(1 << 20)
        assert file.nbytes == os.fstat(file.fd).st_size == 3 << 20
        assert os.fstat(file.fd).st_blocks * 512 >= 3 << 20


def test_a_file_system_without_o_direct_falls_back_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(monkeypatch, "_write_and_read", errno.EINVAL)
    with SwapFile(tmp_path) as file:
        assert not file.o_direct
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert str(tmp_path) in record.getMessage()
        assert "Invalid argument" in record.getMessage()
        file.reserve(PAGE_NBYTES)
        assert os.pwrite(file.fd, b"odd", 7) == 3  # the flag is off again


def test_a_file_system_that_cannot_reserve_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "fallocate", errno.EOPNOTSUPP)
    with SwapFile(tmp_path) as file, pytest.raises(StorageError, match="name a folder on ext4"):
        file.reserve(1 << 20)


def test_a_full_device_names_path_bytes_and_key_and_leaves_the_file_as_it_was(tiny: Path) -> None:
    with SwapFile(tiny) as file:
        file.reserve(1 << 20)
        with pytest.raises(NoSpaceError, match=r"needs 7\.0 MiB more, 3\.0 MiB free") as caught:
            file.reserve(8 << 20)
        assert "budget.nvme" in str(caught.value)
        assert str(tiny) in caught.value.path
        assert file.nbytes == os.fstat(file.fd).st_size == 1 << 20
        file.reserve(3 << 20)  # what fits still fits


def test_nothing_is_left_after_kill_9(directory: Path) -> None:
    code = (
        "import sys, time; from offload.swap.io.swap_file import SwapFile\n"
        "file = SwapFile(sys.argv[1]); file.reserve(64 << 20); print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    free_before = os.statvfs(directory).f_bfree
    with subprocess.Popen(
        [sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait(30) == -signal.SIGKILL
    assert list(directory.iterdir()) == []
    if file_system_of(directory) == "tmpfs":  # other programs do not write 64 MiB meanwhile
        assert os.statvfs(directory).f_bfree > free_before - (32 << 20) // PAGE_NBYTES


class Held:
    """A file whose reservations do not return until `release`."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._real, self._go_on = swap_file.fallocate, threading.Event()
        self.file = SwapFile(directory, timeout_s=60)
        monkeypatch.setattr(swap_file, "fallocate", self._held)

    def _held(self, *args: Any) -> None:
        give_up_this_call()
        assert self._go_on.wait(60)
        self._real(*args)

    def release(self) -> None:
        """All is done that waited for it, too."""
        self._go_on.set()
        assert all_ended()


def test_a_stuck_reservation_is_not_waited_for_twice_and_the_file_grows_once_it_is_over(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(directory, monkeypatch)
    with held.file as file:
        with pytest.raises(StuckError, match="reserving 8") as caught:
            file.reserve(8192)
        assert caught.value.path == file.path
        monkeypatch.setattr(swap_file, "TimeoutThread", None)  # nothing else is asked
        with pytest.raises(StuckError, match="reserving 8"):
            file.reserve(4096)
        assert file.nbytes == 0
        monkeypatch.undo()
        held.release()
        file.reserve(4096)
        assert file.nbytes == 4096
        assert os.fstat(file.fd).st_size == 8192  # as the late call has made it


def test_a_file_is_closed_when_a_stuck_call_on_it_returns_and_not_before(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(directory, monkeypatch)
    fd = held.file.fd
    with pytest.raises(StuckError):
        held.file.reserve(8192)
    held.file.close()
    held.file.close()
    os.fstat(fd)
    held.release()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
