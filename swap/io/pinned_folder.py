"""A folder for swap files, opened once: what is checked is what is used, whatever happens to its
name meanwhile. Everything in the folder is made relative to its descriptor.
"""

import errno
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from offload.tiers.errors import PathError

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ROOT_UID = 0


@dataclass(frozen=True, slots=True)
class PinnedFolder:
    """A folder that is open. `fd` is for calls with dir_fd; `path` (absolute, without links) for
    messages."""

    fd: int
    path: Path


@contextmanager
def pinned(path: str | os.PathLike[str]) -> Iterator[PinnedFolder]:
    """Open a folder in which only this user and root can replace what is made, and which this user
    can write to. Creates its last component (0700) if missing. Raises PathError."""
    folder = _opened(path)
    try:
        check_owner(folder)
        check_writable(folder)
        yield folder
    finally:
        close(folder.fd)


def _opened(path: str | os.PathLike[str]) -> PinnedFolder:
    named = Path(path).expanduser().absolute()
    try:
        with suppress(OSError):
            os.statvfs(named)  # mounts what is mounted when it is used; O_PATH would not
        real = Path(os.path.realpath(named))
        if not named.is_symlink():  # what a link leads to is not made
            with suppress(FileExistsError):
                os.mkdir(real, 0o700)
        return PinnedFolder(os.open(real, _FOLDER), real)
    except ValueError as error:  # NUL
        raise PathError(f"nvme.paths: {str(named)!r} cannot be a folder: {error}") from None
    except FileNotFoundError:
        if named.is_symlink():
            raise PathError(
                f"nvme.paths: {named} is a link to {real}, which does not exist; make "
                "that folder, or name another"
            ) from None
        raise PathError(
            f"nvme.paths: {real} does not exist and neither does {real.parent}; is "
            "the drive mounted? Only the last part of a path is created"
        ) from None
    except OSError as error:
        raise _refusal(real, error) from None


def check_owner(folder: PinnedFolder) -> None:
    """Raise PathError if another user could replace what is made here, or exchange the folder
    for a file system of their own."""
    try:
        status = os.fstat(folder.fd)
    except OSError as error:
        raise _refusal(folder.path, error) from None
    mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
    remedy = "name a folder in it that does not exist yet, which is then made for this user"
    is_open = status.st_mode & stat.S_IWOTH
    if is_open and status.st_mode & stat.S_ISVTX:
        return  # like /tmp: any user may add files, none may touch those of others
    if is_open:
        raise PathError(
            f"nvme.paths: {folder.path} is writable by every user and has no sticky bit "
            f"({mode}); chmod 0700 it, or {remedy}"
        )
    if status.st_uid not in (_ROOT_UID, os.geteuid()):
        raise PathError(
            f"nvme.paths: {folder.path} belongs to {_user(status.st_uid)} ({mode}), and this is "
            f"{_user(os.geteuid())}; chown it, or {remedy}"
        )


def check_writable(folder: PinnedFolder) -> None:
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder.fd):
        raise PathError(f"nvme.paths: {folder.path} is not writable by this user; name another")


def free_nbytes(folder: PinnedFolder) -> int:
    """Bytes that this user can still write. Raises PathError."""
    try:
        status = os.statvfs(folder.fd)
    except OSError as error:
        raise _refusal(folder.path, error) from None
    return status.f_bavail * status.f_frsize


def close(fd: int) -> None:
    """Close a descriptor, if it is one, of which no byte is wanted any more: nothing can fail."""
    if fd >= 0:
        with suppress(OSError):
            os.close(fd)


def _refusal(path: Path, error: OSError) -> PathError:
    if error.errno == errno.ENOTDIR:
        return PathError(f"nvme.paths: {path} is not a directory; name one")
    return PathError(f"nvme.paths: {path} cannot be opened: {error.strerror}; name another")


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"
