"""Bytes to and from files, with typed errors: short writes completed, ENOSPC named."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.tiers.errors import CheckpointError, NoSpaceError, StorageError
from offload.tiers.units import format_bytes

_LIBC = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CALL_NBYTES = 256 << 20  # a system call moves less than 2 GiB; this one can be interrupted


@contextmanager
def storage_errors(
    doing: str, path: Path, offset_bytes: int = 0, nbytes: int = 0
) -> Iterator[None]:
    """OSError as NoSpaceError or StorageError that says what was being done to `path`."""
    try:
        yield
    except OSError as error:
        raise _storage_error(error, doing, path, offset_bytes, nbytes) from error


def _storage_error(
    error: OSError, doing: str, path: Path, offset_bytes: int, nbytes: int
) -> StorageError:
    code = errno.errorcode.get(error.errno or 0, "error")
    where = f" ({format_bytes(nbytes)} at byte {offset_bytes})" if nbytes else ""
    message = f"{doing} {path}{where} failed: {error.strerror} [{code}]"
    kind: type[StorageError] = StorageError
    if error.errno in _FULL:
        kind = NoSpaceError
        message += "; free space there, or save to another file system"
    return kind(
        message, path=str(path), offset_bytes=offset_bytes, nbytes=nbytes, errno=error.errno
    )


def write_all(fd: int, data: memoryview, offset_bytes: int, path: Path) -> None:
    """Write all of `data`. `path` is for the message of NoSpaceError or StorageError."""
    data = data.cast("B")
    with storage_errors("writing", path, offset_bytes, data.nbytes):
        done = 0
        while done < data.nbytes:
            done += os.pwrite(fd, data[done : done + _CALL_NBYTES], offset_bytes + done)


def read_all(fd: int, buffer: memoryview, offset_bytes: int, path: Path) -> None:
    """Fill `buffer`. CheckpointError where the file ends before that."""
    buffer = buffer.cast("B")
    done = 0
    with storage_errors("reading", path, offset_bytes, buffer.nbytes):
        while done < buffer.nbytes:
            part = buffer[done : done + _CALL_NBYTES]
            count = os.preadv(fd, [part], offset_bytes + done)
            if not count:
                raise CheckpointError(
                    f"{path} ends at byte {offset_bytes + done}, {buffer.nbytes - done} bytes "
                    "short; load another checkpoint"
                )
            done += count


def start_writeback(fd: int) -> None:
    """Let the device begin on what was written so far; does not wait (nothing where unsupported).

    Without it the device idles until fsync: copying and writing would take turns.
    """
    call = getattr(_LIBC, "sync_file_range", None)
    if call is not None:
        call(fd, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


def read_ahead(fd: int, offset_bytes: int, nbytes: int) -> None:
    """Let the device begin to read a range into the page cache; does not wait."""
    os.posix_fadvise(fd, offset_bytes, nbytes, os.POSIX_FADV_WILLNEED)


def forget(fd: int, offset_bytes: int, nbytes: int) -> None:
    """Let the page cache give up a range, so that the next read asks the device."""
    os.posix_fadvise(fd, offset_bytes, nbytes, os.POSIX_FADV_DONTNEED)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free_nbytes(path: Path) -> int:
    """Bytes that this process may still write below `path`."""
    status = os.statvfs(path)
    blocks = status.f_bfree if os.geteuid() == 0 else status.f_bavail
    return blocks * status.f_frsize


def check_room(path: Path, needed_nbytes: int) -> None:
    """NoSpaceError if `needed_nbytes` cannot be written below `path`."""
    with storage_errors("looking at", path):
        free = free_nbytes(path)
    if needed_nbytes > free:
        raise NoSpaceError(
            f"no room for a checkpoint of {format_bytes(needed_nbytes)} in {path.parent}: "
            f"{format_bytes(free)} are free; free {format_bytes(needed_nbytes - free)} there, or "
            "save to another file system",
            path=str(path), nbytes=needed_nbytes, errno=errno.ENOSPC,
        )  # fmt: skip
