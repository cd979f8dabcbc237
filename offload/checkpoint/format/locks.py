"""Locks on folders (flock), which end with the process, however it ends.

    parent of checkpoints    exclusive, for a few renames: other processes wait to rename there
    NAME.tmp-*               exclusive, while it is written
    any folder               shared, while it is read; exclusive, while it is removed

On file systems without locks no call waits, and folders that killed writers left stay.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from offload.checkpoint.format.disk import OpenFile, make_call
from offload.tiers.errors import CheckpointError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
_PATIENCE_S = 25.0  # the error comes within 30 s
POLL_S = 0.005
_FOLDER = os.O_RDONLY | os.O_DIRECTORY


class OpenFolder(OpenFile):
    """An open folder, and the lock on it. Both end with the object at the latest."""

    def __init__(self, path: Path, inside: OpenFolder | None = None) -> None:
        """`inside`: the open folder that contains it, whatever happens to that one's name; a link
        raises NotADirectoryError then. Raises OSError."""
        self._pid = os.getpid()
        if inside is None:
            super().__init__(path, _FOLDER)
        else:
            super().__init__(path, _FOLDER | os.O_NOFOLLOW, inside=inside.fd)

    def lock(self) -> bool:
        """Lock exclusively; False if the file system has no locks. BlockingIOError if another
        holder has it; OSError."""
        return self._lock(fcntl.LOCK_EX)

    def share(self) -> bool:
        """Lock against removal; False if it is being removed or about to be named, True also if the
        file system has no locks."""
        try:
            self._lock(fcntl.LOCK_SH)
        except BlockingIOError:
            return False
        return True

    def _lock(self, kind: int) -> bool:
        try:
            make_call("lock", self.path, fcntl.flock, self.fd, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise
        return True

    def close(self) -> None:
        if self.fd >= 0 and self._pid == os.getpid():  # a forked child must not end a shared lock
            with suppress(OSError):  # no locks here
                fcntl.flock(self.fd, fcntl.LOCK_UN)  # what a Ctrl-C cuts short, __del__ repeats
        super().close()


def lock_folder(path: Path) -> OpenFolder | None:
    """The open folder with its exclusive lock; None if the file system has no locks.

    BlockingIOError if another holder has it.
    """
    folder = OpenFolder(path)
    try:
        return folder if folder.lock() else None
    except BaseException:
        folder.close()
        raise


def unlock(folder: OpenFolder | None) -> None:
    if folder is not None:
        folder.close()


@contextmanager
def alone_in(parent: Path) -> Iterator[None]:
    """Keep other processes from renaming or recovering in `parent` inside the block.

    CheckpointError if another process (a stopped one) keeps the lock.
    """
    lock = _wait_for(parent)
    try:
        yield
    finally:
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
