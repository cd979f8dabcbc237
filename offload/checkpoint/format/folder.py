"""Replacing a checkpoint folder so that a reader, or a killed writer, never leaves a torn one.

The new folder is written beside the old one as NAME.tmp-RANDOM, and the two change names in one
system call (RENAME_EXCHANGE); where that is missing, between two renames NAME does not exist, but
both folders do, and are complete. A writer holds a lock on its folder, which ends with the process:
`recover` gives complete folders of dead writers their NAME where it is missing, and removes others.
On file systems without locks, what killed writers left stays.

A checkpoint is known by its manifest, which ends in a hash of itself. A folder that holds files
that no checkpoint has is never replaced or removed.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from offload.checkpoint.format.disk import (
    FULL,
    OpenFile,
    entries,
    exchange,
    is_folder,
    is_there,
    lock_folder,
    make_call,
    make_folder,
    real_path,
    rename,
    storage_error,
    storage_errors,
    sync_folder,
    unlock,
)
from offload.checkpoint.format.manifest import MANIFEST, OPTIMIZER, PARAMETERS, is_data_file
from offload.checkpoint.format.reader import CheckpointReader
from offload.tiers.errors import CheckpointError, PathError, StorageError

# version 0.1.0 began with three kinds of them
_PENDING = re.compile(r"(?P<name>.+)\.(tmp|old|del)-[0-9a-f]{28}")
_NOT_THE_PATH = (errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, *FULL)
_SHOWN = 4
_log = logging.getLogger("offload")


class PendingFolder:
    """A checkpoint written beside `target`. A context manager; without `commit` it is removed.

    PathError if the folder cannot be made or `target` is something else than a checkpoint.
    """

    def __init__(self, target: Path) -> None:
        self.target = self.path = target
        self._lock: OpenFile | None = None
        self._is_pending = False  # a folder at `path`, which has no other name yet

    def __enter__(self) -> PendingFolder:
        try:
            self.target = real_path(self.target)  # a link keeps pointing at what it points at
            self.path = pending_name(self.target)
            self._make()
        except ValueError as error:  # the root folder, or a NUL
            raise PathError(
                f"{str(self.target)!r} cannot be a checkpoint's folder: {error}"
            ) from None
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
        make_folder(self.target.parent, parents=True)
        recover(self.target.parent)
        with suppress(FileNotFoundError):  # another process removes it
            check_replaceable(self.target)
        while True:
            make_folder(self.path)
            self._is_pending = True
            try:
                self._lock = lock_folder(self.path)
                if is_there(self.path):
                    return
            except (FileNotFoundError, BlockingIOError):
                pass
            # another process took it for that of a dead writer, before it was locked
            self._unlock()
            self.path = pending_name(self.target)

    def commit(self) -> None:
        """Give this folder the name `target`, durably. It must have the manifest and be synced."""
        with storage_errors("writing", self.path):
            for inner in (PARAMETERS, OPTIMIZER, "."):
                sync_folder(self.path / inner)
            replaced = self._take_name()
            self._is_pending = False
            self._unlock()  # it may be removed
            sync_folder(self.target.parent)
        if replaced is not None:
            remove(replaced)

    def _take_name(self) -> Path | None:
        """Give this folder its name; returns the new path of what had it before."""
        while True:
            try:
                check_replaceable(self.target)  # another process may have put something there
                return _publish(self.path, self.target)
            except FileNotFoundError:
                if not is_there(self.path):
                    raise
                # another process has just removed what had the name

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self._unlock()
        else:
            self._give_up()

    def _give_up(self) -> None:
        """Remove the folder. If it was published, it stays with what it replaced: after a crash the
        old names might be back."""
        if self._is_pending:
            remove(self.path)
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        unlock(lock)


def _publish(new: Path, target: Path) -> Path | None:
    """Give `new` the name `target`; returns the new path of the folder that had it before."""
    try:
        rename(new, target)  # it is not there, or empty
        return None
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if exchange(new, target):
        return new
    old = pending_name(target)
    try:
        rename(target, old)
        rename(new, target)
    except BaseException:
        if not is_there(target):
            rename(old, target)
        raise
    return old


# --------------------------------------------------------------------------- leftovers
def pending_name(target: Path) -> Path:
    """A new name beside `target` for a folder that is not complete yet, or is about to be
    removed."""
    return target.with_name(f"{target.name}.tmp-{secrets.token_hex(14)}")


def adopt(path: Path) -> None:
    """Give a folder that a killed writer had finished under another name its own name back."""
    try:
        real = real_path(path)
        if not is_there(real) and is_folder(real.parent):
            recover(real.parent)
    except (OSError, ValueError):
        return  # no path, or not writable: opening it reports that there is no checkpoint


def recover(parent: Path) -> None:
    """Adopt or remove the folders that killed processes left in `parent`, except for folders that
    another process writes or removes."""
    for path, target in _leftovers(parent):
        try:
            lock = lock_folder(path)
        except OSError:
            continue  # another process uses it, or has just removed it
        if lock is None:
            continue  # nothing says that its writer is dead
        try:
            if not _adopt(path, target):
                remove(path)
        except (OSError, StorageError) as error:  # it may be complete, or be another user's
            _log.warning("%s stays: %s", path, error)
        finally:
            unlock(lock)


def _leftovers(parent: Path) -> list[tuple[Path, Path]]:
    """The pending folders in `parent`, each with the name that it was to have; newest first."""
    leftovers = []
    for entry in entries(parent):
        match = _PENDING.fullmatch(entry.name)
        if match is None or not entry.is_dir(follow_symlinks=False):
            continue
        with suppress(FileNotFoundError):  # just removed by the process that replaced it
            path = parent / entry.name
            status = make_call("stat", path, os.lstat, path)
            leftovers.append((status.st_mtime_ns, path, parent / match["name"]))
    return [(path, target) for _, path, target in sorted(leftovers, reverse=True)]


def _adopt(leftover: Path, target: Path) -> bool:
    """Give the folder its name; False if it is not complete, or has been replaced."""
    if is_there(target):
        return False
    try:
        with CheckpointReader(leftover) as reader:
            reader.check(contents=False)
    except CheckpointError:
        return False
    rename(leftover, target)
    _log.info("adopted %s: its writer was stopped just before naming it so", target)
    return True


# --------------------------------------------------------------------------- removing
def discard(path: Path) -> bool:
    """Remove a checkpoint, by one rename; False if there is none, or another process removes it.
    PathError, and nothing is changed, if `path` holds something else. StorageError."""
    with storage_errors("removing", path):
        if not is_there(path):
            return False
        doomed, lock = pending_name(path), None
        try:
            check_replaceable(path)
            lock = lock_folder(path)
            rename(path, doomed)
            sync_folder(path.parent)  # a crash must not bring back the name with half of it
            remove(doomed)
        except (BlockingIOError, FileNotFoundError):  # another process is faster
            return False
        finally:
            unlock(lock)
    return True


def remove(path: Path) -> None:
    """Remove a pending folder, unless it holds foreign files. No link is followed, also if one
    takes a name meanwhile."""
    try:
        foreign = _foreign(path)
        if foreign:
            _log.warning("%s stays: it holds %s", path, ", ".join(foreign[:_SHOWN]))
        else:
            make_call("rmtree", path, shutil.rmtree, path)
    except FileNotFoundError:
        return  # another process has removed it
    except OSError as error:
        _log.warning("%s stays, removing it failed: %s", path, error.strerror or error)


def _foreign(folder: Path) -> list[str]:
    """The names in a folder, and in a checkpoint's two subfolders, that no checkpoint has: other
    files, links, pipes and the like."""
    foreign = []
    for entry in entries(folder):
        inside, names = [entry], [entry.name]
        if entry.name in (PARAMETERS, OPTIMIZER) and entry.is_dir(follow_symlinks=False):
            inside = entries(folder / entry.name)
            names = [f"{entry.name}/{inner.name}" for inner in inside]
        foreign += [
            name for name, each in zip(names, inside, strict=True)
            if not each.is_file(follow_symlinks=False)
            or not (name == MANIFEST or is_data_file(name))
        ]  # fmt: skip
    return sorted(foreign)


def check_replaceable(target: Path) -> None:
    """Raise PathError, naming the contents, unless `target` is a checkpoint, empty or absent."""
    if _PENDING.fullmatch(target.name):
        raise PathError(f"{target} is a name for what is not complete yet; name another path")
    if not is_there(target):
        return
    if not is_folder(target):
        raise PathError(f"{target} is a file, a checkpoint is a folder; name another path")
    if make_call("stat", target, os.path.ismount, target):
        raise PathError(f"{target} is where a disk is mounted; name a folder in it")
    names = [entry.name for entry in entries(target)]
    foreign, why = _foreign(target), "no checkpoint has such a file"
    if MANIFEST not in names:
        foreign, why = foreign or names, f"there is no {MANIFEST} that says so"
    if foreign:
        listing = ", ".join(foreign[:_SHOWN]) + (", ..." if len(foreign) > _SHOWN else "")
        raise PathError(
            f"{target} holds {listing}, which is not part of a checkpoint ({why}) and would be "
            "lost; move it, or name another path"
        )
    if names:
        try:
            CheckpointReader(target).close()
        except CheckpointError as error:
            raise PathError(
                f"{target} holds a {MANIFEST} that is not one of offload's, and would be lost: "
                f"{error}. Move or remove {target}, or name another path"
            ) from None
