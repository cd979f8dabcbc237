"""A request to a backend, and the pieces it is moved in.

What may go wrong with one system call is decided here, once for all backends: short transfers,
errors that are worth another try, and the typed error for those that are not.
"""

import enum
import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offload.swap.threads.transfer import Failure
from offload.tiers.errors import NoSpaceError, StorageError
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import format_bytes

MAX_CALL_NBYTES = 0x7FFFF000  # Linux moves no more than this in one call
MAX_RETRIES = 8  # without progress; the pauses add up to a quarter of a second
_BRIEF = (errno.EINTR, errno.EAGAIN, errno.EBUSY)
_FIRST_PAUSE_S = 0.001

_REMEDIES = {
    errno.EIO: "the device or its file system is failing: see `dmesg`, or take the path out of "
    "nvme.paths",
    errno.ENOSPC: "free space there, lower budget.nvme or change nvme.paths",
    errno.EDQUOT: "the quota is used up: raise it, lower budget.nvme or change nvme.paths",
    errno.EINVAL: "buffer, offset or length does not have the alignment that O_DIRECT asks for",
}


class Priority(enum.IntEnum):
    """The purpose of a request. Served in this order; within one priority, first in, first out."""

    URGENT = 0  # a gather is waiting
    NORMAL = 1  # prefetch, optimizer
    BACKGROUND = 2  # write-back


class Operation(enum.StrEnum):
    READ = "read"
    WRITE = "write"


@dataclass(slots=True, eq=False)
class IORequest:
    """One read or write of a caller. `buffer` is flat bytes and must stay valid until the end.

    Its transfer knows it, by `what`, and not the other way round: each request would leave a cycle
    behind, and with it its memory, until the collector comes.
    """

    operation: Operation
    fd: int
    buffer: memoryview
    offset_bytes: int
    path: str
    priority: Priority
    before: Callable[[], None] | None
    after: Callable[[], Any] | None  # what it returns is the value of the transfer
    sequence: int
    failure: Failure | None = None  # the first one; the pieces not yet moved are skipped
    pieces_left: int = 1
    finished: bool = False
    owner: str = ""  # of the bytes, for messages

    def __str__(self) -> str:
        owner = f" ({self.owner})" if self.owner else ""
        return (
            f"{self.operation.value} of {format_bytes(self.buffer.nbytes)} at offset "
            f"{self.offset_bytes} of {self.path}{owner}"
        )

    def failed(self, what: str, error: OSError | None = None) -> StorageError:
        """The typed error for this request; raise it `from` the original one."""
        number = None if error is None else error.errno
        kind = NoSpaceError if number in (errno.ENOSPC, errno.EDQUOT) else StorageError
        remedy = "" if number is None else _REMEDIES.get(number, "")
        return kind(
            f"{self} failed: {what}" + (f"; {remedy}" if remedy else ""),
            path=self.path, offset_bytes=self.offset_bytes, nbytes=self.buffer.nbytes,
            errno=number,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class IOPiece:
    """A part of a request, moved by one call or, if that comes up short, by several."""

    request: IORequest
    start: int  # in the request's buffer
    nbytes: int
    moved_nbytes: int = 0
    retries: int = 0  # since the last progress
    begun: bool = False  # `before` has run and the request is cut
    moving: bool = False  # a call is under way
    ended: bool = False
    given_up: bool = False  # its call has not returned for too long

    @property
    def finished(self) -> bool:
        return self.moved_nbytes == self.nbytes

    @property
    def offset_bytes(self) -> int:
        """The offset in the file at which the next call continues."""
        return self.request.offset_bytes + self.start + self.moved_nbytes

    def remaining(self) -> memoryview:
        begin = self.start + self.moved_nbytes
        end = min(self.start + self.nbytes, begin + MAX_CALL_NBYTES)
        return self.request.buffer[begin:end]

    def advance(self, count: int) -> None:
        """Book what one call moved. Raises StorageError at the end of the file, or when calls
        keep moving next to nothing."""
        if count == 0 and self.request.operation is Operation.READ:
            missing = self.nbytes - self.moved_nbytes
            raise self.request.failed(
                f"the file ends {format_bytes(missing)} too early, at offset {self.offset_bytes}; "
                "it was truncated"
            )
        aligned = (self.request.offset_bytes + self.start) % PAGE_NBYTES == 0
        if self.moved_nbytes + count < self.nbytes and aligned and self.nbytes % PAGE_NBYTES == 0:
            count -= count % PAGE_NBYTES  # is moved again: a request of pages stays one (O_DIRECT)
        self.moved_nbytes += count
        if count:
            self.retries = 0
            return
        self.retries += 1
        if self.retries > MAX_RETRIES:
            raise self.request.failed(f"{MAX_RETRIES} calls in a row moved less than a page")

    def pause_before_retry(self, error: OSError) -> float:
        """Seconds to wait before the same call is made again. Raises the typed error, from
        `error`, when that is no use: retries are few and only for what passes."""
        if error.errno in _BRIEF and self.retries < MAX_RETRIES:
            self.retries += 1
            return float(_FIRST_PAUSE_S * 2 ** (self.retries - 1))
        name = errno.errorcode.get(error.errno or 0, "error")
        raise self.request.failed(f"{name}, {error.strerror or error}", error) from error
