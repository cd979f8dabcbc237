"""Bytes, files and names of checkpoints: typed errors, short writes completed, ENOSPC named, and no
endless wait (see `hands`). Functions that change or look up names raise plain OSErrors."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from offload.swap.io.hands import Call, Hand, patiently
from offload.swap.io.maker_marks import marked
from offload.swap.threads.shield import defer_signals
from offload.tiers.errors import CheckpointError, NoSpaceError, StorageError, StuckError
from offload.tiers.units import format_bytes, in_one_unit

R = TypeVar("R")

_LIBC = ctypes.CDLL(None, use_errno=True)
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # of sync_file_range
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
FULL = (errno.ENOSPC, errno.EDQUOT)
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ESPIPE)
_CALL_NBYTES = 16 << 20  # that a call moves: a slow disk, too, ends one long before it is given up
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_READ_NBYTES = 512 << 10  # stays in the processor's cache until it has been copied


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
    elif error.errno == errno.EMFILE:
        message += "; raise the limit of open files (`ulimit -n`)"
    elif error.errno == errno.EFBIG:
        message += (
            "; raise the limit of a file's size (`ulimit -f`), or save to another file system"
        )
    return kind(
        message, path=str(path), offset_bytes=offset_bytes, nbytes=nbytes, errno=error.errno
    )


# --------------------------------------------------------------------------- files
class OpenFile:
    """A file with a hand of its own, which closes it behind all other calls: a descriptor is never
    another file's while a call that was given up may still use it."""

    _hand: Hand | None = None

    def __init__(self, operation: str, path: Path, *args: Any, **options: Any) -> None:
        """`args` and `options` are those of `os.open`."""
        self.path = path
        self.fd = -1
        self._read: bytearray | None = None  # never the caller's memory, see `read_all`
        self._hand = Hand()

        def opened() -> None:  # where no Ctrl-C comes between a call and what it returns
            self.fd = os.open(*args, **options)

        try:
            self._call(operation, opened)
        except BaseException:
            self.close()
            raise

    def _call(
        self, operation: str, function: Callable[..., R], *args: Any, offset: int = 0, n: int = 0
    ) -> R:
        assert self._hand is not None, "it is open"
        return self._hand.make(
            operation, self.path, function, *args, offset_bytes=offset, nbytes=n
        )  # fmt: skip

    def close(self) -> None:
        """Close the file; waits, unless a call is stuck. Raises no error: data was synced."""
        with defer_signals:
            hand = self._let_go()
        if hand is not None and hand.is_here:
            hand.end()

    def _let_go(self) -> Hand | None:
        hand, self._hand = self._hand, None
        if hand is not None and hand.is_here:
            hand.ask(Call("close", self.path, self._close))
        elif hand is not None:  # a forked child, which has a descriptor of its own
            self._close()
        return hand

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with suppress(OSError):  # its bytes were synced, or are not wanted
                os.close(fd)

    def __del__(self) -> None:
        self._let_go()

    def begin(
        self, operation: str, function: Callable[..., R], *args: Any, offset: int = 0, n: int = 0
    ) -> Call[R]:
        """Queue a call of `function(fd, *args)` behind all others. `result` returns its results, in
        the order of these calls."""
        assert self._hand is not None, "it is open"
        call = Call(operation, self.path, function, self.fd, *args, offset_bytes=offset, nbytes=n)
        self._hand.ask(call)
        return call

    def result(self, call: Call[R]) -> R:
        """The result of a call that was begun, once it has returned. Its OSError, StuckError."""
        assert self._hand is not None, "it is open"
        return self._hand.result(call)

    def status(self) -> os.stat_result:
        return self._call("stat", os.fstat, self.fd)

    def write_all(self, data: memoryview, offset_bytes: int) -> None:
        """Write all of `data`. Raises NoSpaceError, StuckError or StorageError."""
        data = data.cast("B")
        done = 0
        with storage_errors("writing", self.path, offset_bytes, data.nbytes):
            while done < data.nbytes:
                done += self.write_some(data[done:], offset_bytes + done)

    def write_some(self, data: memoryview, offset_bytes: int) -> int:
        """Write once; returns the number of bytes written, at least 1. OSError, StuckError."""
        part = data[:_CALL_NBYTES]
        count = self._call(
            "pwrite", os.pwrite, self.fd, part, offset_bytes, offset=offset_bytes, n=part.nbytes
        )  # fmt: skip
        if not count:
            raise OSError(errno.EIO, "nothing was written")
        return count

    def read_all(self, buffer: memoryview, offset_bytes: int) -> None:
        """Fill `buffer`. CheckpointError if the file ends before that, StuckError, StorageError.

        Reads into memory of its own: a read that was given up and returns later must not change
        weights, which may be others by then.
        """
        buffer = buffer.cast("B")
        own, self._read = self._read or bytearray(_READ_NBYTES), None
        whole, done = memoryview(own), 0
        with storage_errors("reading", self.path, offset_bytes, buffer.nbytes):
            while done < buffer.nbytes:
                part, at = whole[: min(_READ_NBYTES, buffer.nbytes - done)], offset_bytes + done
                count = self._call(
                    "preadv", os.preadv, self.fd, [part], at, offset=at, n=part.nbytes
                )  # fmt: skip
                if not count:
                    raise CheckpointError(
                        f"{self.path} ends at byte {at}, {buffer.nbytes - done} bytes short; load "
                        "another checkpoint"
                    )
                buffer[done : done + count] = part[:count]
                done += count
        self._read = own

    def start_writeback(self) -> None:
        """Let the device begin to write what was written so far; does not wait for it.

        Without it the device idles until fsync: copying and writing would take turns.
        """
        with storage_errors("writing", self.path):
            self._call("sync_file_range", _sync_range, self.fd, 0, 0, _WRITE)

    def sync(self) -> None:
        """Wait until all is on the device."""
        with storage_errors("writing", self.path):
            for call in self.begin_sync(self.status().st_size):
                self.result(call)

    def begin_sync(self, nbytes: int) -> list[Call[None]]:
        """Begin to sync all of its `nbytes`; results like those of `begin`. It is done in parts, so
        that a large file on a slow device is not taken for a device that does not answer."""
        flags = _WAIT_BEFORE | _WRITE | _WAIT_AFTER
        parts = [
            self.begin(
                "sync_file_range", _sync_range, start, _CALL_NBYTES, flags,
                offset=start, n=min(_CALL_NBYTES, nbytes - start),
            )
            for start in range(0, nbytes, _CALL_NBYTES)
        ]  # fmt: skip
        return [*parts, self.begin("fsync", os.fsync)]

    def read_ahead(self, offset_bytes: int, nbytes: int) -> None:
        """Let the device begin to read a range into the page cache; does not wait for it."""
        self._advise(offset_bytes, nbytes, os.POSIX_FADV_WILLNEED)

    def forget(self, offset_bytes: int, nbytes: int) -> None:
        """Let the page cache give up a range, so that the next read asks the device."""
        self._advise(offset_bytes, nbytes, os.POSIX_FADV_DONTNEED)

    def begin_forget(self) -> Call[None]:
        """Let the page cache drop all of it; a result like those of `begin`."""
        return self.begin("fadvise", os.posix_fadvise, 0, 0, os.POSIX_FADV_DONTNEED)

    def _advise(self, offset_bytes: int, nbytes: int, advice: int) -> None:
        with storage_errors("reading", self.path):
            self._call("fadvise", os.posix_fadvise, self.fd, offset_bytes, nbytes, advice)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_all(fd: int, buffer: memoryview, offset_bytes: int, path: Path) -> None:
    """Fill `buffer` from a file that is not one of our checkpoints, waiting for each call to end.
    CheckpointError if the file ends before that, StorageError."""
    buffer, done = buffer.cast("B"), 0
    with storage_errors("reading", path, offset_bytes, buffer.nbytes):
        while done < buffer.nbytes:
            part = buffer[done : done + _CALL_NBYTES]
            count = os.preadv(fd, [part], offset_bytes + done)
            if not count:
                raise CheckpointError(f"{path} ends at byte {offset_bytes + done}")
            done += count


def new_file(path: Path) -> OpenFile:
    """A new file to write. NoSpaceError, StuckError or StorageError, also if it exists."""
    with storage_errors("creating", path):
        return OpenFile("create", path, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def write_text(path: Path, text: str) -> None:
    """Write a new file with a text, durable except for its name."""
    data = text.encode()
    with new_file(path) as file:
        file.write_all(memoryview(data), 0)
        file.sync()


def replace_text(path: Path, text: str) -> None:
    """Write a file with a text, durably: a reader finds what was there before, or the text."""
    pending = path.with_name(marked(f".{path.name}"))
    try:
        write_text(pending, text)
        with storage_errors("writing", path):
            rename(pending, path)
            sync_folder(path.parent)
    except BaseException as error:
        if not isinstance(error, StuckError):  # else it would wait for the same disk
            with suppress(OSError):  # what led here is the error
                remove_file(pending)
        raise


def _sync_range(fd: int, offset_bytes: int, nbytes: int, flags: int) -> None:
    """sync_file_range(2), if the system has it. A write error that it reports is not reported by a
    later fsync."""
    call = getattr(_LIBC, "sync_file_range", None)
    if call is None or not call(fd, ctypes.c_int64(offset_bytes), ctypes.c_int64(nbytes), flags):
        return
    code = ctypes.get_errno()
    if code not in _UNKNOWN:
        raise OSError(code, os.strerror(code))


# --------------------------------------------------------------------------- names
def make_folder(path: Path, *, parents: bool = False) -> None:
    """Make a folder. `parents`: with those above it, durably, and it may exist already."""
    above = (path, *path.parents) if parents else ()
    missing = [*takewhile(lambda folder: not is_there(folder), above)]
    patiently("mkdir", path, lambda: path.mkdir(parents=parents, exist_ok=parents))
    for folder in missing:
        # a parent that may be written to and not read cannot be synced
        with suppress(PermissionError):
            sync_folder(folder.parent)


def rename(old: Path, new: Path) -> None:
    patiently("rename", new, lambda: os.rename(old, new))


def exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    return patiently("exchange", b, _exchange, a, b)


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


def remove_file(path: Path) -> None:
    patiently("unlink", path, lambda: os.unlink(path))


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder."""

    def look() -> list[os.DirEntry[str]]:
        found = list(os.scandir(folder))
        for entry in found:
            entry.is_symlink()  # where the folder does not say of what kind it is, it asks now
        return found

    return patiently("scandir", folder, look)


def real_path(path: Path) -> Path:
    """The path with its links followed. ValueError for a NUL."""
    return Path(patiently("realpath", path, os.path.realpath, path))


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder, or a link to one."""
    return patiently("stat", path, os.path.isdir, path)


def is_link(path: Path) -> bool:
    return patiently("stat", path, os.path.islink, path)


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

    return patiently("stat", path, look)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""

    def sync() -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    patiently("fsync folder", path, sync)


def sync_tree(path: Path) -> None:
    """Make a file, or a folder with all files in it, durable; but not its own name."""
    if not is_folder(path):
        sync_file(path)
        return
    for entry in entries(path):
        if not entry.is_symlink():
            sync_tree(path / entry.name)
    sync_folder(path)


def sync_files(folder: Path) -> None:
    """Make the contents of the files in a folder durable, but not of those in folders below."""
    for entry in entries(folder):
        if entry.is_file(follow_symlinks=False):
            sync_file(folder / entry.name)


def sync_file(path: Path) -> None:
    """Make the contents of a file durable that was written by other code."""
    with storage_errors("writing", path), OpenFile("open", path, path, _OPEN_FLAGS) as file:
        file.sync()


def device_of(path: Path) -> int:
    """The number of the file system of `path`."""
    return patiently("stat", path, os.stat, path).st_dev


def free_nbytes(path: Path) -> int:
    """Bytes that this process may still write below `path`."""
    status = patiently("statvfs", path, os.statvfs, path)
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
