"""What descriptors of a checkpoint's files and locks on its folder are worth."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload.checkpoint.format import locks
from offload.checkpoint.format.disk import OpenFile, new_file
from offload.checkpoint.format.locks import alone_in, lock_folder, unlock
from offload.errors import CheckpointError, NoSpaceError


def test_a_lock_that_a_stopped_process_keeps_is_an_error_within_half_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 20 < locks._PATIENCE_S < 30
    monkeypatch.setattr(locks, "_PATIENCE_S", 0.05)
    holder = lock_folder(tmp_path)
    with pytest.raises(CheckpointError, match="another process has locked"), alone_in(tmp_path):
        raise AssertionError("it is locked")
    unlock(holder)


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
