"""Files that dead processes left in a folder: found by name, and removed on request.

Files and folders carry the mark of the process that made them (`swap/maker_marks`), checkpoints
that were being written are locked by it (`checkpoint/ownership`). Nothing else is ever touched, nor
anything that belongs to another user.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offload.checkpoint.format.folder import discard, recover
from offload.checkpoint.format.locks import lock_folder, unlock
from offload.checkpoint.format.ownership import leftovers as pending_checkpoints
from offload.process import machine
from offload.swap.io.maker_marks import Life, maker_of
from offload.tiers.errors import PathError

STATE = "state.ckpt"  # of a checkpoint of Lightning's, see `integrations/streamed_folder`
_PENDING_STATE = re.compile(rf"\.{re.escape(STATE)}\.(?P<states>states-[0-9a-f]{{8}})\.tmp-")
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
    is_checkpoint: bool = False  # whole, and with a name, but nothing refers to it


def leftovers(folder: Path) -> list[Leftover]:
    """Return the leftovers in `folder` itself and in Lightning's checkpoints in it, by name, but
    none of a process that lives. Raises OSError."""
    places = [folder, *_streamed(folder)]
    found = [each for place in places for each in (*_marked(place), *_checkpoints(place))]
    return sorted(found, key=lambda each: each.path)


def _streamed(folder: Path) -> Iterator[Path]:
    """Yield the folders in `folder` that hold a `STATE`, or one that is being written."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            with suppress(OSError):  # not ours to look into
                if any(name.startswith((STATE, f".{STATE}")) for name in os.listdir(entry.path)):
                    yield folder / entry.name


def clean(folder: Path) -> list[Leftover]:
    """Remove what dead processes left in `folder`, and return it. A checkpoint that lacked only its
    name gets it. Raises OSError."""
    found = {each.path: each for each in leftovers(folder) if each.is_dead}
    for place in {each.path.parent for each in found.values() if each.pid is None}:
        recover(place)  # what gets its name may be a part of what is removed next
    found |= {each.path: each for each in leftovers(folder) if each.is_dead}
    for each in found.values():
        if each.is_checkpoint:
            with suppress(PathError):  # with something else in it, it stays
                discard(each.path)
        elif each.pid is not None:
            _remove(each.path, folder)
    return [each for each in found.values() if not os.path.lexists(each.path)]


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
                yield from _begun(path, maker.pid, is_dead=life is Life.DEAD)
                yield Leftover(path, _nbytes(path), maker.pid, life is Life.DEAD)


def _begun(pending: Path, pid: int, *, is_dead: bool) -> Iterator[Leftover]:
    """Yield the engine's states that a pending `STATE` would have named."""
    match = _PENDING_STATE.match(pending.name)
    states = None if match is None else pending.with_name(match["states"])
    if states is not None and states.is_dir() and _is_ours(states.lstat()):
        yield Leftover(states, _nbytes(states), pid, is_dead, is_checkpoint=True)


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


def _remove(path: Path, folder: Path) -> None:
    """Remove `path`, which is in `folder` or in one of its folders. Never follows a link."""
    only = 0 if path.parent == folder else os.O_NOFOLLOW
    opened = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | only)
    try:
        with suppress(FileNotFoundError):
            status = os.stat(path.name, dir_fd=opened, follow_symlinks=False)
            if not _is_ours(status):
                return
            if stat.S_ISDIR(status.st_mode):
                shutil.rmtree(path.name, dir_fd=opened)
            else:
                os.unlink(path.name, dir_fd=opened)
    finally:
        os.close(opened)
