"""One private file per path, in which a tier's extents lie. It vanishes with the process.

The file has no name: it is made with O_TMPFILE, or (on NFS, FUSE) unlinked as soon as it is made.
Runs cannot collide, and no other user can open it. A process that is killed between the two leaves
an empty file.

Whatever is asked of the folder or the file, a timeout thread asks: a StuckError where it is not
answered for `timeout_s`. What comes back later is closed then.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from offload.swap.io.io_watch import TIMEOUT_S
from offload.swap.io.pinned_folder import PinnedFolder, close, free_nbytes, pinned
from offload.swap.io.timeout_thread import TimeoutThread
from offload.tiers.errors import NoSpaceError, PathError, StateError, StorageError, StuckError
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import format_bytes, in_one_unit, round_up

_log = logging.getLogger(__name__)

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# O_TMPFILE: EISDIR on kernels that do not know it, the others from file systems
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


@dataclass(frozen=True)
class DirectoryReport:
    path: Path  # absolute, links resolved
    free_nbytes: int  # for this user


def check_directory(
    path: str | os.PathLike[str], *, needed_nbytes: int = PAGE_NBYTES, timeout_s: float = TIMEOUT_S
) -> DirectoryReport:
    """Make sure swap files can live in `path`; create its last component (0700) if missing.

    Raises PathError if the parent is missing, `path` is no directory or not writable, it belongs to
    another user or others could replace files in it, or less than `needed_nbytes` are free.
    """
    call = TimeoutThread("looking at", path, _check_directory, path, needed_nbytes)
    return call.result(timeout_s)


def _check_directory(path: str | os.PathLike[str], needed_nbytes: int) -> DirectoryReport:
    with pinned(path) as folder:
        free = free_nbytes(folder)
        if free < needed_nbytes:
            needed, left = in_one_unit(needed_nbytes, free)
            raise PathError(
                f"nvme.paths: {folder.path} has {left} free, {needed} needed; free space "
                "there or name another path"
            )
        return DirectoryReport(folder.path, free)


def free_space(path: str | os.PathLike[str], timeout_s: float = TIMEOUT_S) -> int:
    """Bytes this user can still write where `path` is. OSError."""
    return TimeoutThread("asking for the free space of", path, _free_space, path).result(timeout_s)


def _free_space(path: str | os.PathLike[str] | int) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def file_system_of(path: Path) -> str:
    """The type of the file system that holds `path` (absolute); "unknown" if it cannot be told."""
    with suppress(OSError):
        mounts = psutil.disk_partitions(all=True)
        # later mounts on the same point hide earlier ones
        over = [mount for mount in reversed(mounts) if path.is_relative_to(mount.mountpoint)]
        return max(over, key=lambda mount: len(mount.mountpoint)).fstype
    return "unknown"


class SwapFile:
    """A private file in `directory`, of which `nbytes` are reserved on the device.

    `fd` is for a backend to read and write; `o_direct` says whether that goes past the page
    cache, which needs memory, offsets and lengths in whole pages. Not thread-safe; the fd is.
    """

    def __init__(self, directory: str | os.PathLike[str], *, timeout_s: float = TIMEOUT_S) -> None:
        """Creates the file; blocks for two page-sized probes. Raises PathError."""
        self.fd = -1
        self._timeout_s = timeout_s
        self._open_fd = -1  # until it is closed, which may be later than `close`
        self._left: TimeoutThread[None] | None = None  # a call that has not returned when it should
        self.nbytes = 0
        self.o_direct = False
        call = TimeoutThread("making a swap file in", directory, self._make, directory)
        try:
            call.result(timeout_s)
        except BaseException:
            if not call.when_returned(self._close_file):
                self.close()
            raise

    def _make(self, directory: str | os.PathLike[str]) -> None:
        with pinned(directory) as folder:
            self.directory = folder.path
            self.path = f"{self.directory}/<swap file>"  # for errors; it has no name
            self.fd = self._open_fd = _unnamed_file(folder)
        try:
            self._go_direct()
        except BaseException:
            self._close_file()
            raise

    def reserve(self, nbytes: int) -> None:
        """Make the file at least `nbytes` long (whole pages), on the device and not sparse. Never
        shrinks.

        Blocks for some milliseconds per GiB. Raises NoSpaceError if the device cannot hold it;
        the file is then as long as before.
        """
        if self.fd < 0:
            raise StateError(f"{self.path} is closed")
        nbytes = round_up(nbytes, PAGE_NBYTES)
        more = nbytes - self.nbytes
        if more <= 0:
            return
        if self._left is not None and not self._left.has_returned:
            raise self._left.stuck()
        what = f"reserving {format_bytes(more)} for"
        call = TimeoutThread(what, self.path, self._reserve, nbytes)
        try:
            call.result(self._timeout_s)
        except BaseException:
            if not call.has_returned:
                self._left = call
            raise
        self.nbytes = nbytes

    def _reserve(self, nbytes: int) -> None:
        try:
            fallocate(self.fd, self.nbytes, nbytes - self.nbytes)
        except OSError as error:
            # Half of the blocks may have been taken: give them back.
            with suppress(OSError):
                os.ftruncate(self.fd, self.nbytes)
            raise self._growth_error(nbytes, error) from error

    def close(self) -> None:
        """Close the file, whose bytes are gone with that. Calling it again does nothing. A call
        that does not return is left, and logged: nothing is lost with it."""
        self.fd = -1
        if self._open_fd < 0 or (self._left and self._left.when_returned(self._close_file)):
            return  # its number must not be another file's while that call is under way
        try:
            TimeoutThread("closing", self.path, self._close_file).result(self._timeout_s)
        except StuckError as error:
            _log.error("%s", error)

    def _close_file(self) -> None:
        fd, self._open_fd = self._open_fd, -1
        close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _go_direct(self) -> None:
        """Switch O_DIRECT on if a real write and read succeed with it, else log the reason."""
        try:
            _probe_direct(self.fd)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise self._growth_error(PAGE_NBYTES, error) from error
            if error.errno not in UNSUPPORTED:
                raise StorageError(
                    f"{self.path}: probing it failed: {error.strerror}; see `dmesg`",
                    path=self.path, nbytes=PAGE_NBYTES, errno=error.errno,
                ) from error  # fmt: skip
            _log.warning(
                "%s (%s) refuses O_DIRECT (%s): I/O goes through the page cache, which is slower "
                "and takes RAM outside budget.host",
                self.path, file_system_of(self.directory), error.strerror,
            )  # fmt: skip
            return
        self.o_direct = True

    def _growth_error(self, nbytes: int, error: OSError) -> StorageError:
        needed_nbytes = nbytes - self.nbytes
        if error.errno in NO_SPACE or error.errno == errno.EFBIG:
            needed, free = format_bytes(needed_nbytes), "?"
            with suppress(OSError):
                needed, free = in_one_unit(needed_nbytes, _free_space(self.fd))
            return NoSpaceError(
                f"{self.path} needs {needed} more, {free} free ({error.strerror}); lower "
                "budget.nvme, free space there or change nvme.paths",
                path=self.path, offset_bytes=self.nbytes, nbytes=needed_nbytes,
                errno=error.errno,
            )  # fmt: skip
        remedy = ""
        if error.errno in UNSUPPORTED:
            kind = file_system_of(self.directory)
            remedy = f"; {kind} cannot reserve space: name a folder on ext4 or xfs in nvme.paths"
        return StorageError(
            f"{self.path} could not be made {format_bytes(nbytes)} long: {error.strerror}{remedy}",
            path=self.path, offset_bytes=self.nbytes, nbytes=needed_nbytes,
            errno=error.errno,
        )  # fmt: skip


def _unnamed_file(folder: PinnedFolder) -> int:
    """The descriptor of a new file without a name, mode 0600. Raises PathError."""
    try:
        return _open_unnamed(folder)
    except OSError as error:
        raise PathError(
            f"nvme.paths: a file cannot be created in {folder.path}: {error.strerror}; "
            "name another path"
        ) from error


def _open_unnamed(folder: PinnedFolder) -> int:
    try:
        # O_EXCL: it cannot be given a name later on (linkat), either.
        flags = os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        return os.open(".", flags, 0o600, dir_fd=folder.fd)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    return _unlinked_file(folder)


def _unlinked_file(folder: PinnedFolder) -> int:
    """Open a new file and unlink it at once, where the file system has no O_TMPFILE: the file has a
    name for an instant."""
    name = f"offload-swap.tmp-{secrets.token_hex(6)}"
    flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=folder.fd)
    try:
        os.unlink(name, dir_fd=folder.fd)
    except BaseException:
        close(fd)
        raise
    return fd


def _probe_direct(fd: int) -> None:
    """Set O_DIRECT on `fd`, if page-aligned I/O works with it.

    Else leaves `fd` as it was and raises OSError. Only a real transfer tells: some file systems
    accept the flag and refuse the write.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        # Not closed by hand: the traceback of a refusal still refers to it.
        _write_and_read(fd, memoryview(mmap.mmap(-1, PAGE_NBYTES)))
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        raise
    finally:
        os.ftruncate(fd, 0)


def _write_and_read(fd: int, page: memoryview) -> None:
    """Write and read a page. Raises OSError, EINVAL also if fewer bytes moved."""
    wrote = os.pwritev(fd, [page], 0)
    read = os.preadv(fd, [page], 0)
    if (wrote, read) != (page.nbytes, page.nbytes):
        raise OSError(errno.EINVAL, f"{wrote} bytes written and {read} read of {page.nbytes}")


def fallocate(fd: int, offset_bytes: int, nbytes: int) -> None:
    """fallocate(2) itself: where a file system lacks it, posix_fallocate would write a byte to
    every block instead, for minutes."""
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "fallocate64", None) or libc.fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(fd, 0, offset_bytes, nbytes) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
