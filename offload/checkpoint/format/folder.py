"""Replacing a checkpoint folder so that a reader, or a killed writer, never leaves a torn one.

The new folder is written beside the old one (`ownership` has the names) and the two change names
in one system call (RENAME_EXCHANGE); where that is missing, between two renames NAME does not
exist, but NAME.old-* and NAME.tmp-* are both complete. What a killed process leaves is found by
`recover`: its lock is gone. Complete folders whose NAME is missing are adopted, everything else
that is ours is removed. Nothing ever waits for a pointer file to agree. Any number of processes may
save in one folder or under one name, and read there: renames are made alone, and nothing is removed
that is locked.
"""

from __future__ import annotations

import errno
import logging
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from offload.checkpoint.format.disk import (
    FULL,
    entries,
    exchange,
    is_folder,
    is_there,
    make_folder,
    real_path,
    rename,
    storage_error,
    storage_errors,
    sync_folder,
)
from offload.checkpoint.format.locks import OpenFolder, alone_in, lock_folder, unlock
from offload.checkpoint.format.ownership import (
    Leftover,
    check_replaceable,
    leftovers,
    marked,
    remove,
)
from offload.checkpoint.format.reader import CheckpointReader
from offload.tiers.errors import CheckpointError, PathError, StorageError

_NOT_THE_PATH = (
    errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, *FULL,
)  # fmt: skip
_log = logging.getLogger("offload")


class PendingFolder:
    """A checkpoint written beside `target`. A context manager; without `commit` it is removed.

    PathError if the folder cannot be made or `target` is something else than a checkpoint.
    """

    def __init__(self, target: Path) -> None:
        try:
            self.target = real_path(target)  # a link keeps pointing at what it points at
            self.path = marked(self.target, "tmp")
        except ValueError as error:  # the root folder, or a NUL
            raise PathError(f"{str(target)!r} cannot be a checkpoint's folder: {error}") from None
        except OSError as error:
            raise storage_error(error, "looking at", target) from error
        self._lock: OpenFolder | None = None
        self._is_published = False

    def __enter__(self) -> PendingFolder:
        try:
            self._make()
        except OSError as error:
            self._give_up()
            if error.errno in _NOT_THE_PATH:
                raise storage_error(error, "making", self.path) from error
            raise PathError(
                f"cannot write a checkpoint to {self.target}: {error.strerror}; name a folder that "
                "you may write to"
            ) from None
        except BaseException:
            self._give_up()
            raise
        return self

    def _make(self) -> None:
        parent = self.target.parent
        make_folder(parent, parents=True)
        recover(parent)
        with alone_in(parent):  # between mkdir and lock it must not be taken for a leftover
            check_replaceable(self.target)
            make_folder(self.path)
            self._lock = lock_folder(self.path)

    def commit(self) -> None:
        """Give this folder the name `target`, durably. It must have the manifest and be synced."""
        parent = self.target.parent
        with ExitStack() as locks:
            with storage_errors("writing", self.path):
                inner = (self.path / each.name for each in entries(self.path) if each.is_dir())
                for folder in (*inner, self.path):
                    sync_folder(folder)
                with alone_in(parent):
                    check_replaceable(self.target)  # another process may have put something there
                    replaced = _publish(self.path, self.target)
                    self._is_published = True
                    self._unlock()  # it can be read
                    doomed = None if replaced is None else _condemn(replaced, self.target, locks)
                sync_folder(parent)
            if doomed is not None:
                remove(doomed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if error is None:
            self._unlock()
        else:
            self._give_up()

    def _give_up(self) -> None:
        """Remove the folder. If it was published, it stays with what it replaced: after a crash the
        old names might be back."""
        if self._is_published:
            self._unlock()
            return
        with suppress(OSError):  # it stays; what led here is the error
            if is_there(self.path):
                remove(self.path)
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        unlock(lock)


def adopt(path: Path) -> None:
    """Give a folder that a killed writer had finished under another name its own name back."""
    try:
        real = real_path(path)
        if not is_there(real) and is_folder(real.parent):
            recover(real.parent)
    except (OSError, ValueError):
        return  # not ours to write to, or no path: who opens it says that there is no checkpoint


def recover(parent: Path) -> None:
    """Adopt or remove the folders that killed processes left in `parent`, except for folders that
    another process writes, reads or removes."""
    with ExitStack() as locks:
        with alone_in(parent):
            doomed = [each.path for each in leftovers(parent) if _is_doomed(each, locks)]
        for path in doomed:  # takes long; other processes leave alone what we have locked
            remove(path)


def _is_doomed(leftover: Leftover, locks: ExitStack) -> bool:
    """Whether it has to be removed, in which case it stays locked. Adopts it if possible."""
    try:
        lock = lock_folder(leftover.path)
    except OSError:
        return False  # another process uses it, or has just removed it
    if lock is None:
        return False  # nothing says that its writer is dead
    locks.callback(unlock, lock)
    try:
        return not _adopt(leftover)
    except (OSError, StorageError) as error:  # it may be complete, or be another user's
        _log.warning("%s stays: %s", leftover.path, error)
        return False


def _adopt(leftover: Leftover) -> bool:
    """Give the folder its name; False if it is not complete, or has been replaced."""
    if leftover.kind == "del" or is_there(leftover.target):
        return False
    try:
        with CheckpointReader(leftover.path, shared=False) as reader:
            reader.check(contents=False)
    except CheckpointError:
        return False
    rename(leftover.path, leftover.target)
    _log.info("adopted %s: its writer was stopped just before naming it so", leftover.target)
    return True


def discard(path: Path) -> bool:
    """Remove a checkpoint, by one rename; False if there is none. PathError, and nothing is
    changed, if `path` holds something else. StorageError."""
    with ExitStack() as locks:
        with storage_errors("removing", path), alone_in(path.parent):
            if not is_there(path):
                return False
            check_replaceable(path)
            doomed = _condemn(path, path, locks)
            sync_folder(path.parent)  # a crash must not bring back the name with half of it
        if doomed is not None:
            remove(doomed)
    return True


def _condemn(folder: Path, target: Path, locks: ExitStack) -> Path | None:
    """Give the folder a name that is never adopted, and lock it; None if it is still being read:
    the next `recover` then finds it."""
    doomed = marked(target, "del")
    rename(folder, doomed)
    try:
        locks.callback(unlock, lock_folder(doomed))
    except BlockingIOError:
        return None
    return doomed


def _publish(new: Path, target: Path) -> Path | None:
    """Give `new` the name `target`; returns the new path of the folder that had it before."""
    if not is_there(target):
        rename(new, target)
        return None
    if exchange(new, target):
        return new
    old = marked(target, "old")
    try:
        rename(target, old)
        rename(new, target)
    except BaseException:
        if not is_there(target):
            rename(old, target)
        raise
    return old
