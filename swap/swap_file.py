"""One private file per path, in which a tier's extents lie. It vanishes with the process.

The file has no name: it is made with O_TMPFILE, or unlinked as soon as it is made. Nothing can be
left behind, runs cannot collide, and no other user can open it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from offload.tiers.errors import NoSpaceError, PathError, StateError, StorageError
from offload.tiers.extent import PAGE_NBYTES
from offload.tiers.units import format_bytes, round_up

_log = logging.getLogger(__name__)

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# O_TMPFILE: EISDIR on kernels that do not know it, the others from file systems
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


@dataclass(frozen=True)
class DirectoryReport:
    """The result of `check_directory`."""

    path: Path  # absolute, links resolved
    free_nbytes: int  # for this user
    created: bool


def check_directory(
    path: str | os.PathLike[str], *, needed_nbytes: int = PAGE_NBYTES
) -> DirectoryReport:
    """Make sure swap files can live in `path`; create its last component (0700) if missing.

    Raises PathError if the parent is missing, it is no directory, it is not writable, other users
    could replace our files in it, or less than `needed_nbytes` are free.
    """
    target = Path(path).expanduser().absolute()
    created = _create_last_component(target)
    target = target.resolve()
    status = target.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise PathError(f"nvme.paths: {target} is not a directory; name one")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise PathError(
            f"nvme.paths: {target} is writable by every user and has no sticky bit "
            f"(mode {stat.S_IMODE(status.st_mode):04o}); chmod 0700 it, or name another"
        )
    if not os.access(target, os.W_OK | os.X_OK):
        raise PathError(f"nvme.paths: {target} is not writable by this user; name another")
    free_nbytes = free_space(target)
    if free_nbytes < needed_nbytes:
        raise PathError(
            f"nvme.paths: {target} has {format_bytes(free_nbytes)} free, "
            f"{format_bytes(needed_nbytes)} needed; free space there or name another path"
        )
    return DirectoryReport(target, free_nbytes, created)


def _create_last_component(target: Path) -> bool:
    if target.exists():
        return False
    if not target.parent.is_dir():
        raise PathError(
            f"nvme.paths: {target} does not exist and neither does {target.parent}; is the drive "
            "mounted? Only the last part of a path is created"
        )
    try:
        target.mkdir(mode=0o700, exist_ok=True)  # another rank may have been quicker
    except OSError as error:
        raise PathError(
            f"nvme.paths: {target} cannot be created: {error.strerror}; name another"
        ) from error
    return True


def free_space(path: str | os.PathLike[str]) -> int:
    """Bytes this user can still write where `path` is."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def file_system_of(path: Path) -> str:
    """The type of the file system that holds `path` (absolute), from /proc/self/mountinfo."""
    best, kind = -1, "unknown"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return kind
    for line in lines:
        left, _, right = line.partition(" - ")
        # Blanks in mount points are octal escapes.
        mount_point = left.split()[4].encode().decode("unicode_escape")
        # Later mounts on the same point hide earlier ones, hence >=.
        if path.is_relative_to(mount_point) and len(mount_point) >= best:
            best, kind = len(mount_point), right.split()[0]
    return kind


def direct_refusal(path: str | os.PathLike[str]) -> str | None:
    """Why O_DIRECT does not work in `path`; None if it does. Raises PathError."""
    fd = _open_unnamed(check_directory(path).path)
    try:
        _probe_direct(fd)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(fd)
    return None


class SwapFile:
    """A private file in `directory`, of which `nbytes` are reserved on the device.

    `fd` is for a backend to read and write; `o_direct` says whether that goes past the page
    cache, which needs memory aligned to `memory_alignment` and offsets and lengths to
    `offset_alignment`; both are 1 where any will do. Not thread-safe; the fd is.
    """

    def __init__(self, directory: str | os.PathLike[str], *, direct: bool = True) -> None:
        """Creates the file; blocks for two page-sized probes. Raises PathError."""
        self.directory = check_directory(directory).path
        self.path = f"{self.directory}/<swap file>"  # for errors; it has no name
        self.nbytes = 0
        self.o_direct = False
        self.memory_alignment = 1
        self.offset_alignment = 1
        self._preallocates = True
        self.fd = _open_unnamed(self.directory)
        try:
            if direct:
                self._go_direct()
        except BaseException:
            self.close()
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
        if nbytes <= self.nbytes:
            return
        try:
            self._grow(nbytes)
        except OSError as error:
            # Half of the blocks may have been taken: give them back.
            os.ftruncate(self.fd, self.nbytes)
            raise self._growth_error(nbytes, error) from error
        self.nbytes = nbytes

    def close(self) -> None:
        """Close the file, whose bytes are gone with that. Calling it again does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def _go_direct(self) -> None:
        """Switch O_DIRECT on if a real write and read succeed with it, else say why not."""
        try:
            found = _probe_direct(self.fd)
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise self._growth_error(PAGE_NBYTES, error) from error
            if error.errno not in _UNSUPPORTED:
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
        self.memory_alignment, self.offset_alignment = found

    def _grow(self, nbytes: int) -> None:
        if self._preallocates:
            try:
                _fallocate(self.fd, self.nbytes, nbytes - self.nbytes)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                self._preallocates = False
                _log.warning(
                    "%s (%s) cannot reserve space (%s): a full device will show up only when "
                    "something is written",
                    self.path, file_system_of(self.directory), error.strerror,
                )  # fmt: skip
            else:
                return
        if free_space(self.directory) < nbytes - self.nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(self.fd, nbytes)

    def _growth_error(self, nbytes: int, error: OSError) -> StorageError:
        needed_nbytes = nbytes - self.nbytes
        if error.errno in _NO_SPACE or error.errno == errno.EFBIG:
            return NoSpaceError(
                f"{self.path} needs {format_bytes(needed_nbytes)} more, "
                f"{format_bytes(free_space(self.directory))} free ({error.strerror}); lower "
                "budget.nvme, free space there or change nvme.paths",
                path=self.path, offset_bytes=self.nbytes, nbytes=needed_nbytes,
                errno=error.errno,
            )  # fmt: skip
        return StorageError(
            f"{self.path} could not be made {format_bytes(nbytes)} long: {error.strerror}",
            path=self.path, offset_bytes=self.nbytes, nbytes=needed_nbytes,
            errno=error.errno,
        )  # fmt: skip


def _open_unnamed(directory: Path) -> int:
    """A read-write descriptor of a new file, mode 0600, that has no name. Raises PathError."""
    try:
        # O_EXCL: it cannot be given a name later on (linkat), either.
        flags = os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        return os.open(directory, flags, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise _cannot_create(directory, error) from error
    try:
        return _open_and_unlink(directory)
    except OSError as error:
        raise _cannot_create(directory, error) from error


def _cannot_create(directory: Path, error: OSError) -> PathError:
    return PathError(
        f"nvme.paths: a file cannot be created in {directory}: {error.strerror}; name another path"
    )


def _open_and_unlink(directory: Path) -> int:
    """For file systems without O_TMPFILE (NFS, FUSE): named for an instant, in a 0700 folder."""
    private = directory / f"offload-{os.getpid()}-{secrets.token_hex(8)}"
    private.mkdir(mode=0o700)
    name = private / "swap"
    try:
        flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600)
        name.unlink()
        return fd
    finally:
        private.rmdir()


def _probe_direct(fd: int) -> tuple[int, int]:
    """Set O_DIRECT on `fd` and return the memory and offset alignments it needs.

    Leaves `fd` as it was and raises OSError if page-aligned I/O fails. Only a real transfer
    tells: some file systems accept the flag and refuse the write.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        # Not closed by hand: the traceback of a refusal still refers to it.
        pages = memoryview(mmap.mmap(-1, 2 * PAGE_NBYTES))
        _write_and_read(fd, pages[:PAGE_NBYTES], 0)
        memory_alignment = _smallest_accepted(fd, pages, in_memory=True)
        offset_alignment = _smallest_accepted(fd, pages, in_memory=False)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        raise
    finally:
        os.ftruncate(fd, 0)
    return memory_alignment, offset_alignment


def _smallest_accepted(fd: int, pages: memoryview, *, in_memory: bool) -> int:
    """The smallest power of two, up to a page, that transfers may be misaligned by."""
    for alignment in (1, 4, 512):
        shift = alignment if in_memory else 0
        nbytes = PAGE_NBYTES if in_memory else alignment
        try:
            _write_and_read(fd, pages[shift : shift + nbytes], 0 if in_memory else alignment)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            return alignment
    return PAGE_NBYTES


def _write_and_read(fd: int, page: memoryview, offset_bytes: int) -> None:
    """Raises OSError, EINVAL also if fewer bytes moved."""
    wrote = os.pwritev(fd, [page], offset_bytes)
    read = os.preadv(fd, [page], offset_bytes)
    if (wrote, read) != (page.nbytes, page.nbytes):
        raise OSError(errno.EINVAL, f"{wrote} bytes written and {read} read of {page.nbytes}")


def _fallocate(fd: int, offset_bytes: int, nbytes: int) -> None:
    """fallocate(2) itself: where a file system lacks it, posix_fallocate would write a byte to
    every block instead, for minutes."""
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "fallocate64", None) or libc.fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(fd, 0, offset_bytes, nbytes) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
