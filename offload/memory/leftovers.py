"""Files that dead processes left in a folder: found by name, and removed on request.

Files and folders carry the mark of the process that made them (`swap/io/process_marks`). It locks
checkpoints while it writes them (`checkpoint/format/ownership`). Nothing else is ever touched.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offload.checkpoint.format.folder import recover
from offload.checkpoint.format.locks import lock_folder, unlock
from offload.checkpoint.format.ownership import leftovers as pending_checkpoints
from offload.process import machine
from offload.swap.io.process_marks import Life, maker_of

# Of one machine at a time. On others (NFS, FUSE, ...) a run of another machine may be alive.
_LOCAL = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "xfs", "zfs"})


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file or folder that process `pid` made. `is_dead` is False if it cannot be told from here
    whether that process lives. A checkpoint has no pid: its lock is gone."""

    path: Path
    nbytes: int
    pid: int | None = None
    is_dead: bool = True


def leftovers(folder: Path) -> list[Leftover]:
    """Return the leftovers in `folder` itself, by name, but none of a process that lives. Raises
    OSError."""
    return sorted([*_marked(folder), *_checkpoints(folder)], key=lambda each: each.path)


def clean(folder: Path) -> list[Leftover]:
    """Remove what dead processes left in `folder`, and return it. A checkpoint that lacked only its
    name gets it. Raises OSError."""
    found = [each for each in leftovers(folder) if each.is_dead]
    if any(each.pid is None for each in found):
        recover(folder)
    for each in found:
        if each.pid is not None:
            _remove(each.path)
    return [each for each in found if not os.path.lexists(each.path)]


def _marked(folder: Path) -> Iterator[Leftover]:
    mount = machine.mount_of(folder)
    is_local = mount is not None and mount.kind in _LOCAL
    for entry in os.scandir(folder):
        maker = maker_of(entry.name)
        if maker is None:
            continue
        with suppress(FileNotFoundError):  # its process has just removed it
            life = maker.life(is_local=is_local)
            if life is not Life.ALIVE and _is_ours(entry.stat(follow_symlinks=False)):
                path = folder / entry.name
                yield Leftover(path, _nbytes(path), maker.pid, life is Life.DEAD)


def _checkpoints(folder: Path) -> Iterator[Leftover]:
    for each in pending_checkpoints(folder):
        with suppress(FileNotFoundError):
            if _is_unlocked(each.path) and _is_ours(each.path.lstat()):
                yield Leftover(each.path, _nbytes(each.path))


def _is_unlocked(path: Path) -> bool:
    try:
        lock = lock_folder(path)
    except OSError:
        return False  # somebody writes, reads or removes it
    unlock(lock)
    return lock is not None  # else there are no locks here that could say so


def _is_ours(status: os.stat_result) -> bool:
    """Return whether it is a file or folder of this user; the library makes no links."""
    plain = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
    return plain and status.st_uid == os.geteuid()


def _nbytes(path: Path) -> int:
    """Return the bytes that `path` takes on the device."""
    total = 0
    for place in (path, *(path.rglob("*") if path.is_dir() else ())):
        with suppress(OSError):
            total += place.lstat().st_blocks * 512
    return total


def _remove(path: Path) -> None:
    """Remove `path`, in the folder in which it was looked at. Never follows a link."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(FileNotFoundError):
            status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            if not _is_ours(status):
                return
            if stat.S_ISDIR(status.st_mode):
                shutil.rmtree(path.name, dir_fd=folder)
            else:
                os.unlink(path.name, dir_fd=folder)
    finally:
        os.close(folder)
