"""Locks on folders (flock), which end with the process, however it ends.

    parent of checkpoints    exclusive, for a few renames: other processes wait to rename there
    NAME.tmp-*               exclusive, while it is written
    any folder               shared, while it is read; exclusive, while it is removed

On file systems without locks nothing is waited for, and what killed writers left stays.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.checkpoint.hands import keep, patiently
from offload.tiers.errors import CheckpointError

_PATIENCE_S = 60.0
POLL_S = 0.005


class OpenFolder:
    """An open folder, and the lock on it. Both end with the object at the latest: a Ctrl-C may come
    before the caller has stored it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = -1
        self._pid = os.getpid()

        def opened() -> None:  # where no Ctrl-C comes between a call and what it returns
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

        patiently("open folder", path, opened)

    def lock(self) -> bool:
        """Exclusively; False where the file system has no locks. BlockingIOError if another holder
        has it."""
        return patiently("lock", self.path, _flock, self.fd, fcntl.LOCK_EX)

    def share(self) -> bool:
        """Against its removal; False if it is being removed or about to be named, True also where
        the file system has no locks."""
        try:
            patiently("lock", self.path, _flock, self.fd, fcntl.LOCK_SH)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        if self.fd < 0:
            return
        if self._pid == os.getpid():  # else a forked child, which shares the lock
            _flock(self.fd, fcntl.LOCK_UN)  # first: what a Ctrl-C cuts short, __del__ repeats
        fd, self.fd = self.fd, -1
        os.close(fd)

    def __del__(self) -> None:
        self.close()


def lock_folder(path: Path) -> OpenFolder | None:
    """With its exclusive lock; None where the file system has no locks.

    BlockingIOError if another holder has it.
    """
    folder = OpenFolder(path)
    return folder if folder.lock() else None


def _flock(fd: int, kind: int) -> bool:
    """False where there are no locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def unlock(folder: OpenFolder | None) -> None:
    if folder is not None:
        folder.close()


@contextmanager
def alone_in(parent: Path) -> Iterator[None]:
    """No other process renames or recovers in `parent` inside the block.

    CheckpointError if another process (a stopped one) keeps the lock.
    """
    lock = _wait_for(parent)
    try:
        yield
    finally:
        if not keep(lock, parent):  # else a rename that was given up may yet come
            unlock(lock)


def _wait_for(parent: Path) -> OpenFolder | None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return lock_folder(parent)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"another process has locked {parent} for {_PATIENCE_S:.0f} s; let it go on or "
                    "end it, or save to another folder"
                ) from None
        time.sleep(POLL_S)
