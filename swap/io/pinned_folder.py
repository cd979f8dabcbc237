"""A folder for swap files, opened once: what is checked is what is used, whatever happens to its
name meanwhile. Everything in the folder is made relative to its descriptor.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from offload.tiers.errors import PathError

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ROOT_UID = 0


class PinnedFolder:
    """A folder that is open. `fd` is for calls with dir_fd; `path` (absolute, without links) for
    messages; `created`: it was not there before. A context manager."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Creates its last component (0700) if missing. Raises PathError."""
        self.fd = -1
        self.created = False
        named = Path(path).expanduser().absolute()
        try:
            with suppress(OSError):
                os.statvfs(named)  # mounts what is mounted when it is used; O_PATH would not
            self.path = Path(os.path.realpath(named))
            if not named.is_symlink():  # what a link leads to is not made
                with suppress(FileExistsError):
                    os.mkdir(self.path, 0o700)
                    self.created = True
            self.fd = os.open(self.path, _FOLDER)
        except ValueError as error:  # NUL
            raise PathError(f"nvme.paths: {str(named)!r} cannot be a folder: {error}") from None
        except FileNotFoundError:
            if named.is_symlink():
                raise PathError(
                    f"nvme.paths: {named} is a link to {self.path}, which does not exist; make "
                    "that folder, or name another"
                ) from None
            raise PathError(
                f"nvme.paths: {self.path} does not exist and neither does {self.path.parent}; is "
                "the drive mounted? Only the last part of a path is created"
            ) from None
        except OSError as error:
            raise _refusal(self.path, error) from None

    def check_owner(self) -> None:
        """Raise PathError if another user could replace what is made here, or exchange the folder
        for a file system of their own."""
        try:
            status = os.fstat(self.fd)
        except OSError as error:
            raise _refusal(self.path, error) from None
        mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
        remedy = "name a folder in it that does not exist yet, which is then made for this user"
        is_open = status.st_mode & stat.S_IWOTH
        if is_open and status.st_mode & stat.S_ISVTX:
            return  # like /tmp: any user may add files, none may touch those of others
        if is_open:
            raise PathError(
                f"nvme.paths: {self.path} is writable by every user and has no sticky bit "
                f"({mode}); chmod 0700 it, or {remedy}"
            )
        if status.st_uid not in (_ROOT_UID, os.geteuid()):
            raise PathError(
                f"nvme.paths: {self.path} belongs to {_user(status.st_uid)} ({mode}), and this is "
                f"{_user(os.geteuid())}; chown it, or {remedy}"
            )

    def check_writable(self) -> None:
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=self.fd):
            raise PathError(f"nvme.paths: {self.path} is not writable by this user; name another")

    @property
    def free_nbytes(self) -> int:
        """Bytes that this user can still write. PathError where the system does not say."""
        try:
            status = os.statvfs(self.fd)
        except OSError as error:
            raise _refusal(self.path, error) from None
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        """Close the folder. Idempotent."""
        fd, self.fd = self.fd, -1
        close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


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
