"""Bytes, files and names of checkpoints: typed errors, short writes completed, hanging calls named.
Functions that change or look up names raise plain OSErrors."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from offload.swap.io.swap_file import UNSUPPORTED, fallocate
from offload.swap.threads.shield import defer_signals
from offload.tiers.errors import CheckpointError, NoSpaceError, PathError, StorageError
from offload.tiers.units import format_bytes, in_one_unit

R = TypeVar("R")

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
FULL = (errno.ENOSPC, errno.EDQUOT)
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ESPIPE)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_log = logging.getLogger("offload")


# --------------------------------------------------------------------------- errors
@contextmanager
def storage_errors(
    doing: str, path: Path, offset_bytes: int = 0, nbytes: int = 0
) -> Iterator[None]:
    """Turn an OSError into a NoSpaceError or StorageError that says what was done to `path`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, doing, path, offset_bytes, nbytes) from error


def storage_error(
    error: OSError, doing: str, path: Path, offset_bytes: int = 0, nbytes: int = 0
) -> StorageError:
    """The NoSpaceError or StorageError of a call that failed."""
    code = errno.errorcode.get(error.errno or 0, "error")
    where = f" ({format_bytes(nbytes)} at byte {offset_bytes})" if nbytes else ""
    message = f"{doing} {path}{where} failed: {error.strerror} [{code}]"
    kind: type[StorageError] = StorageError
    if error.errno in FULL:
        kind = NoSpaceError
        message += "; free space there, or save to another file system"
    return kind(
        message, path=str(path), offset_bytes=offset_bytes, nbytes=nbytes, errno=error.errno
    )


# --------------------------------------------------------------------------- calls
class _Watchdog:
    """Names calls that have not returned for `WARN_AFTER_S`: a disk or a server that does not
    answer keeps the thread that asks, and nothing takes a call back."""

    WARN_AFTER_S = 30.0
    _LOOK_EVERY_S = 0.05  # the thread ends so soon after the last call: a program may fork

    def __init__(self) -> None:
        # until they are named: operation, path and beginning, by the thread that makes the call
        self._calls: dict[int, tuple[str, Path, float]] = {}
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forget_parent)

    def _forget_parent(self) -> None:
        self._calls.clear()
        self._thread = None

    @defer_signals  # a thread that never started would be taken for one that watches
    def began(self, operation: str, path: Path) -> None:
        """Watch a call of this thread until `ended`."""
        self._calls[threading.get_ident()] = operation, path, time.monotonic()
        if self._thread is None and not sys.is_finalizing():  # a thread begun then never runs
            self._thread = threading.Thread(target=self._run, name="offload-watchdog", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no thread can be started: the call is made all the same
                self._thread = None

    def ended(self) -> None:
        """End the watch over this thread's call."""
        self._calls.pop(threading.get_ident(), None)

    def _run(self) -> None:
        while True:
            time.sleep(self._LOOK_EVERY_S)
            self._thread = None  # before it looks: a call that comes then begins another one
            for thread, (operation, path, began_s) in list(self._calls.items()):
                if (seconds := time.monotonic() - began_s) >= self.WARN_AFTER_S:
                    self._calls.pop(thread, None)
                    _log.warning(
                        "%s of %s has not ended for %.3g s: the device or its server does not "
                        "answer, see `dmesg`; a second Ctrl-C ends the program",
                        operation, path, seconds,
                    )  # fmt: skip
            if not self._calls:
                return
            self._thread = threading.current_thread()


_watchdog = _Watchdog()


def make_call(operation: str, path: Path, function: Callable[..., R], *args: Any) -> R:
    """Make a call of the system on a checkpoint: one that does not return is named in the log."""
    try:
        _watchdog.began(operation, path)
        return perform(operation, path, function, *args)
    finally:
        _watchdog.ended()


def perform(operation: str, path: Path, function: Callable[..., R], *args: Any) -> R:
    """Make a call of `make_call`. Tests replace this function with one that fails."""
    return function(*args)


# --------------------------------------------------------------------------- files
class OpenFile:
    """An open file. A context manager, which closes it."""

    fd = -1

    def __init__(
        self, path: Path, flags: int, mode: int = 0o666, *, inside: int | None = None
    ) -> None:  # fmt: skip
        """Opens `path`, below the open folder `inside` by its last name. Raises OSError."""
        self.path = path
        name = path if inside is None else path.name
        operation = "create" if flags & os.O_CREAT else "open"
        self.fd = make_call(
            operation, path, lambda: os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=inside)
        )

    def close(self) -> None:
        """Close the file. Raises no error: its bytes were synced, or are not wanted."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with suppress(OSError):
                make_call("close", self.path, os.close, fd)

    def __del__(self) -> None:
        self.close()

    def status(self) -> os.stat_result:
        """Its status. Raises StorageError."""
        with storage_errors("looking at", self.path):
            return make_call("stat", self.path, os.fstat, self.fd)

    def write_all(self, data: memoryview, offset_bytes: int) -> None:
        """Write all of `data`. Raises NoSpaceError or StorageError."""
        data = data.cast("B")
        done = 0
        with storage_errors("writing", self.path, offset_bytes, data.nbytes):
            while done < data.nbytes:
                at = offset_bytes + done
                count = make_call("pwrite", self.path, os.pwrite, self.fd, data[done:], at)
                if not count:
                    raise OSError(errno.EIO, "nothing was written")
                done += count

    def read_all(self, buffer: memoryview, offset_bytes: int) -> None:
        """Fill `buffer`. Raises CheckpointError if the file ends before that, StorageError."""
        buffer = buffer.cast("B")
        done = 0
        with storage_errors("reading", self.path, offset_bytes, buffer.nbytes):
            while done < buffer.nbytes:
                at = offset_bytes + done
                count = make_call("preadv", self.path, os.preadv, self.fd, [buffer[done:]], at)
                if not count:
                    raise CheckpointError(
                        f"{self.path} ends at byte {at}, {buffer.nbytes - done} bytes short; load "
                        "another checkpoint"
                    )
                done += count

    def reserve(self, nbytes: int) -> None:
        """Reserve the room of a new file in one piece, where the file system can: it is written,
        and removed, with less work. Raises NoSpaceError or StorageError."""
        with storage_errors("writing", self.path, 0, nbytes):
            try:
                make_call("fallocate", self.path, fallocate, self.fd, 0, nbytes)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise

    def sync(self) -> None:
        """Wait until all is on the device."""
        with storage_errors("writing", self.path):
            make_call("fsync", self.path, os.fsync, self.fd)

    def read_ahead(self, offset_bytes: int, nbytes: int) -> None:
        """Let the device begin to read a range into the page cache; does not wait for it."""
        self._advise(offset_bytes, nbytes, os.POSIX_FADV_WILLNEED)

    def forget(self) -> None:
        """Let the page cache drop the file. Raises no error: its bytes are the same."""
        with suppress(StorageError):
            self._advise(0, 0, os.POSIX_FADV_DONTNEED)

    def _advise(self, offset_bytes: int, nbytes: int, advice: int) -> None:
        with storage_errors("reading", self.path):
            make_call("fadvise", self.path, os.posix_fadvise, self.fd, offset_bytes, nbytes, advice)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def new_file(path: Path) -> OpenFile:
    """A new file to write. Raises NoSpaceError or StorageError, also if it exists."""
    with storage_errors("creating", path):
        return OpenFile(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def write_text(path: Path, text: str) -> None:
    """Write a new file with a text, durable except for its name."""
    data = text.encode()
    with new_file(path) as file:
        file.write_all(memoryview(data), 0)
        file.sync()


def replace_text(path: Path, text: str) -> None:
    """Write a file with a text, durably: a reader finds what was there before, or the text."""
    with pending_output(path, replaces=True) as pending:
        write_text(pending, text)


def write_named(path: Path, text: str, option: str = "") -> None:
    """Replace a file as a whole, durably: readers find the old or the new. PathError, naming the
    option that names the file, if the system refuses."""
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            path.write_text(text)  # /dev/stdout, a pipe: nothing that could be replaced
        else:
            replace_text(path.resolve(), text)  # a link stays one
    except (OSError, StorageError) as error:
        reason = os.strerror(error.errno or errno.EIO)
        raise PathError(f"{option} {path}: cannot be written: {reason}".lstrip()) from None


def check_new(out: Path) -> None:
    """Raise PathError unless `out` can be made."""
    with storage_errors("looking at", out):
        if not is_folder(out.parent):
            raise PathError(
                f"{out.parent} is no folder; make it, or name another place for {out.name}"
            )
        if is_there(out):
            raise PathError(f"{out} exists; remove it, or name another file or folder")


@contextmanager
def pending_output(out: Path, *, replaces: bool = False) -> Iterator[Path]:
    """A name for the file or folder that becomes `out` at the end, durably, or is removed.
    `replaces`: an existing file is replaced."""
    pending = out.with_name(f".{out.name}.tmp-{secrets.token_hex(6)}")
    try:
        yield pending
        if not replaces:
            check_new(out)  # another process may have made it meanwhile
        with storage_errors("creating", out):
            sync_tree(pending)  # before it can have the name
            rename(pending, out)
            sync_folder(out.parent)
    except BaseException:
        with suppress(OSError):  # what led here is the error
            shutil.rmtree(pending) if pending.is_dir() else pending.unlink(missing_ok=True)
        raise


# --------------------------------------------------------------------------- names
def make_folder(path: Path, *, parents: bool = False) -> None:
    """Make a folder. `parents`: with those above it, durably, and it may exist already."""
    above = (path, *path.parents) if parents else ()
    missing = [*takewhile(lambda folder: not is_there(folder), above)]
    make_call("mkdir", path, lambda: path.mkdir(parents=parents, exist_ok=parents))
    for folder in missing:
        # a parent that may be written to and not read cannot be synced
        with suppress(PermissionError):
            sync_folder(folder.parent)


def rename(old: Path, new: Path) -> None:
    make_call("rename", new, lambda: os.rename(old, new))


def exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    return make_call("exchange", b, _exchange, a, b)


def _exchange(a: Path, b: Path) -> bool:
    call = getattr(_LIBC, "renameat2", None)
    if call is None:
        return False
    if not call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE):
        return True
    code = ctypes.get_errno()
    if code in _UNKNOWN:
        return False
    raise OSError(code, os.strerror(code), str(b))


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder."""

    def look() -> list[os.DirEntry[str]]:
        listed = list(os.scandir(folder))
        for entry in listed:
            entry.is_symlink()  # where the folder does not say of what kind it is, it asks now
        return listed

    return make_call("scandir", folder, look)


def real_path(path: Path) -> Path:
    """The path with its links followed. ValueError for a NUL."""
    return Path(make_call("realpath", path, os.path.realpath, path))


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder, or a link to one."""
    return make_call("stat", path, os.path.isdir, path)


def is_there(path: Path) -> bool:
    """Whether the name exists, also as a broken link."""

    def look() -> bool:
        try:
            os.lstat(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
                return False
            raise
        return True

    return make_call("stat", path, look)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    with OpenFile(path, os.O_RDONLY | os.O_DIRECTORY) as folder:
        make_call("fsync folder", path, os.fsync, folder.fd)


def sync_tree(path: Path) -> None:
    """Make a file, or a folder with all files in it, durable; but not its own name."""
    if not is_folder(path):
        sync_file(path)
        return
    for entry in entries(path):
        if not entry.is_symlink():
            sync_tree(path / entry.name)
    sync_folder(path)


def sync_file(path: Path) -> None:
    """Make the contents of a file durable that was written by other code."""
    with storage_errors("writing", path), OpenFile(path, _OPEN_FLAGS) as file:
        file.sync()


def lock_folder(path: Path) -> OpenFile | None:
    """Lock a folder exclusively (flock) until `unlock`, or the end of the process; None if the file
    system has no locks. BlockingIOError if another holder has it; OSError."""
    folder = OpenFile(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        make_call("lock", path, fcntl.flock, folder.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        folder.close()
        if error.errno in _NO_LOCKS:
            return None
        raise
    return folder


def unlock(folder: OpenFile | None) -> None:
    """Give a lock back, which forked children may have inherited."""
    if folder is not None:
        with suppress(OSError):
            fcntl.flock(folder.fd, fcntl.LOCK_UN)
        folder.close()


def device_of(path: Path) -> int:
    """The number of the file system of `path`."""
    return make_call("stat", path, os.stat, path).st_dev


def free_nbytes(path: Path) -> int:
    """Bytes that this process may still write below `path`."""
    status = make_call("statvfs", path, os.statvfs, path)
    blocks = status.f_bfree if os.geteuid() == 0 else status.f_bavail
    return blocks * status.f_frsize


def check_room(path: Path, needed_nbytes: int) -> None:
    """Raise NoSpaceError if `needed_nbytes` cannot be written below `path`."""
    with storage_errors("looking at", path):
        free = free_nbytes(path)
    if needed_nbytes > free:
        needed, there, missing = in_one_unit(needed_nbytes, free, needed_nbytes - free)
        raise NoSpaceError(
            f"no room for a checkpoint of {needed} in {path.parent}: {there} are free; free "
            f"{missing} there, or save to another file system",
            path=str(path), nbytes=needed_nbytes, errno=errno.ENOSPC,
        )  # fmt: skip
