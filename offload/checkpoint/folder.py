"""Replacing a checkpoint folder so that a reader, or a killed writer, never leaves a torn one.

    NAME.tmp-RANDOM      being written, by whoever holds its lock; complete once its manifest is in
    NAME                 complete
    NAME.old-RANDOM      replaced, about to be removed

The new folder and the old one change names in one system call (RENAME_EXCHANGE); where that is
missing, between two renames NAME does not exist, but NAME.old-* and NAME.tmp-* are both complete.
What a killed process leaves is found by `recover`: its lock is gone. Complete folders whose NAME is
missing are adopted, everything else is removed. Nothing ever waits for a pointer file to agree.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from offload.checkpoint.disk import storage_errors, sync_folder
from offload.checkpoint.manifest import MANIFEST
from offload.checkpoint.reader import is_complete
from offload.tiers.errors import PathError, StateError

PARAMETERS, OPTIMIZER, BUFFERS = "parameters", "optimizer", "buffers.safetensors"
_NAMES = {MANIFEST, PARAMETERS, OPTIMIZER, BUFFERS}
_LEFTOVER = re.compile(r"(?P<name>.+)\.(?P<kind>tmp|old)-[0-9a-f]{12}")
_PATIENCE_S = 60.0
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_log = logging.getLogger("offload")


class PendingFolder:
    """A checkpoint being written beside `target`. A context manager; without `commit` it is gone.

    PathError where the folder cannot be made or `target` is something else than a checkpoint.
    """

    def __init__(self, target: Path) -> None:
        self.target = Path(os.path.realpath(target))  # a link keeps pointing at what it points at
        self.path = _renamed(self.target, "tmp")
        self._lock: int | None = None

    def __enter__(self) -> PendingFolder:
        parent = self.target.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            recover(parent)
            _check_replaceable(self.target)
            with _alone_in(parent):  # between mkdir and lock nobody may take it for a leftover
                self.path.mkdir()
                self._lock = _lock(self.path)
        except OSError as error:
            raise PathError(
                f"cannot write a checkpoint to {self.target}: {error.strerror}; name a folder that "
                "you may write to"
            ) from None
        return self

    def commit(self) -> None:
        """Let `target` be this folder, durably. The manifest must be in it, everything synced."""
        parent = self.target.parent
        with storage_errors("writing", self.path):
            for folder in (*(p for p in self.path.iterdir() if p.is_dir()), self.path):
                sync_folder(folder)
            with _alone_in(parent):
                replaced = _publish(self.path, self.target)
            sync_folder(parent)
        if replaced is not None:
            _remove(replaced)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if error is not None:
            _remove(self.path)
        _unlock(self._lock)


def recover(parent: Path) -> None:
    """Adopt or remove what killed writers left in `parent`. Leaves alone what somebody writes."""
    doomed: list[tuple[Path, int]] = []
    try:
        with _alone_in(parent):
            for leftover, name in _leftovers(parent):
                lock = _lock(leftover)
                if lock is None:
                    continue  # its writer is alive
                if _adopt(leftover, parent / name):
                    _unlock(lock)
                else:
                    doomed.append((leftover, lock))
        for leftover, _ in doomed:  # takes long; nobody else touches what we have locked
            _remove(leftover)
    finally:
        for _, lock in doomed:
            _unlock(lock)


def _leftovers(parent: Path) -> list[tuple[Path, str]]:
    """Ours among the folders in `parent`, newest first; `tmp` before `old`, which it replaces."""
    found = []
    for path in parent.iterdir():
        match = _LEFTOVER.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink() and _is_ours(path):
            found.append((match["kind"] == "tmp", path.stat().st_mtime_ns, path, match["name"]))
    return [(path, name) for _, _, path, name in sorted(found, reverse=True)]


def _adopt(leftover: Path, target: Path) -> bool:
    if os.path.lexists(target) or not is_complete(leftover):
        return False
    os.rename(leftover, target)
    _log.info("adopted %s: its writer was stopped just before naming it so", target)
    return True


def discard(path: Path) -> None:
    """Remove a checkpoint; killed in the middle, its name is gone or it is still complete."""
    doomed = _renamed(path, "old")
    with _alone_in(path.parent):
        os.rename(path, doomed)
        (doomed / MANIFEST).unlink(missing_ok=True)  # or somebody adopts it
    _remove(doomed)


def _publish(new: Path, target: Path) -> Path | None:
    """Give `new` the name `target`; where the folder is now that had it before."""
    if not os.path.lexists(target):
        os.rename(new, target)
        return None
    if _exchange(new, target):
        return new
    old = _renamed(target, "old")
    os.rename(target, old)
    try:
        os.rename(new, target)
    except OSError:
        os.rename(old, target)
        raise
    return old


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(a), os.fsencode(b)
    if renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(b))


def _renamed(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{kind}-{secrets.token_hex(6)}")


def _remove(folder: Path) -> None:
    # the manifest first: what is left of a removal that is killed must not look complete
    with suppress(OSError):
        (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    return {entry.name for entry in folder.iterdir()} <= _NAMES


def _check_replaceable(target: Path) -> None:
    """Never delete what is not a checkpoint."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise PathError(f"{target} is a file, a checkpoint is a folder; name another path")
    foreign = sorted({entry.name for entry in target.iterdir()} - _NAMES)
    if foreign:
        raise PathError(
            f"{target} holds {', '.join(foreign[:4])}{', ...' if len(foreign) > 4 else ''}, which "
            "is not part of a checkpoint and would be lost; name another path"
        )


@contextmanager
def _alone_in(parent: Path) -> Iterator[None]:
    """Nobody else renames or recovers in `parent` meanwhile (where the file system can lock).

    Held for a few renames only. StateError if somebody (a stopped process) never lets go.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while (lock := _lock(parent)) is None and _can_lock(parent):
        if time.monotonic() > deadline:
            raise StateError(
                f"another process has locked {parent} for {_PATIENCE_S:.0f} s; let it go on or end "
                "it, or save to another folder"
            )
        time.sleep(0.005)
    try:
        yield
    finally:
        _unlock(lock)


def _lock(folder: Path) -> int | None:
    """A lock that ends with the process, whatever ends it; None if it cannot be had now."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _can_lock(folder: Path) -> bool:
    """False on file systems without locks."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _unlock(fd: int | None) -> None:
    if fd is not None:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may share the descriptor
        os.close(fd)
