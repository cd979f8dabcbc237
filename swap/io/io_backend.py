"""The interface of I/O backends, which move bytes between memory and a file descriptor.

`IOBackend` does what all backends have in common (requests, splitting, accounting, calls that do
not return); a backend adds how an `IOPiece` is moved.
"""

import itertools
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

from offload.swap.io.io_watch import TIMEOUT_S, IOWatch, stuck_error
from offload.swap.io.requests_and_retries import IOPiece, IORequest, Operation, Priority
from offload.swap.threads.lanes import Lane, WaitFor
from offload.swap.threads.shield import defer_signals
from offload.swap.threads.transfer import STALL_S, Failure, Transfer
from offload.tiers.errors import OffloadError, StateError
from offload.tiers.tier import PAGE_NBYTES

__all__ = ["IOBackend", "Priority"]

_log = logging.getLogger(__name__)

IO_BLOCK_NBYTES = 16 << 20  # a larger request is split, so that several workers share it


class IOBackend(ABC):
    """Moves bytes between buffers and file descriptors, asynchronously.

    The framework guarantees: `_start` is called once per request, never after `close`, never in
    a forked child; the buffer is flat bytes, at least one of them, writable for a read.
    The implementer owes: every started request ends in exactly one `_finish`, in every case (short
    transfers completed, EINTR and EAGAIN retried within bounds, a dead worker); requests are begun
    in the order of `(priority, sequence)`; `before` has returned before the first byte is written,
    `after` is called once all bytes are there; no piece of a request moves after its `_finish`,
    but one that was given up; `_stop` ends all threads, and joins them unless one is in such a
    call.
    """

    name = "abstract"

    def __init__(
        self, *, io_block_nbytes: int = IO_BLOCK_NBYTES, timeout_s: float = TIMEOUT_S
    ) -> None:  # fmt: skip
        """If calls are under way and none has ended for `timeout_s`, all are given up."""
        if io_block_nbytes <= 0 or io_block_nbytes % PAGE_NBYTES:
            raise ValueError(f"io_block_nbytes {io_block_nbytes} is no multiple of {PAGE_NBYTES}")
        self.io_block_nbytes = io_block_nbytes
        self._sequence = itertools.count()
        self._books = threading.RLock()  # guards everything below
        self._idle = threading.Condition(self._books)
        # bytes that requests have moved so far, counted before their waiters wake up
        self.moved_nbytes = dict.fromkeys(Operation, 0)
        self._closed = False
        self._in_flight: dict[IORequest, Transfer[Any]] = {}  # the oldest first
        self._given_up: Failure | None = None
        self._lost: set[IOPiece] = set()  # calls that were given up and have not returned
        self.lane = Lane(WaitFor.FILES)
        self._pid = os.getpid()
        self.watch = IOWatch(timeout_s, self._books, self._give_up)

    # ---- for callers

    @defer_signals
    def submit(
        self, operation: Operation, fd: int, buffer: memoryview, offset_bytes: int, *, path: str,
        priority: Priority = Priority.NORMAL, before: Callable[[], None] | None = None,
        after: Callable[[], Any] | None = None, owner: str = "",
    ) -> Transfer[Any]:  # fmt: skip
        """Read into `buffer` from `offset_bytes` on, or write it there. Returns at once; the value
        is what `after` returns.

        A read mutates `buffer` until the transfer is done, and in an undefined way if it fails; of
        a write it must not change until then (`before` may change it). `before` and `after` run in
        a worker; an OffloadError they raise is the transfer's error. Raises ValueError for a buffer
        that cannot be moved, StateError if closed.
        """
        if not buffer.c_contiguous or buffer.nbytes == 0:
            raise ValueError(f"{operation.value} of {path}: the buffer is empty or not contiguous")
        if buffer.readonly and operation is Operation.READ:
            raise ValueError(f"read of {path}: the buffer is read-only")
        if buffer.format != "B" or buffer.ndim != 1:
            buffer = buffer.cast("B")
        transfer: Transfer[Any] = Transfer("", self.lane)
        request = IORequest(
            operation, fd, buffer, offset_bytes, path, priority, before, after,
            next(self._sequence), owner=owner,
        )  # fmt: skip
        transfer.what = request
        with self._books:
            self._check_open(request)
            self._in_flight[request] = transfer
            request.failure = self._given_up
        if request.failure is not None:
            self._finish(request)
            return transfer
        try:
            self._start(request)
        except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
            self._note_error(request, error)
            self._finish(request)
        return transfer

    @defer_signals
    def close(self) -> None:
        """Finish what is in flight, and end the threads. Calling it again does nothing. What does
        not end is given up, see `__init__`."""
        with self._idle:
            if self._closed or os.getpid() != self._pid:  # a forked child has none of the threads
                return
            self._closed = True
            while not self._idle.wait_for(lambda: not self._in_flight, STALL_S):
                _log.warning("still waiting for %d requests; see `dmesg`", len(self._in_flight))
        self.watch.close()
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- for implementers

    @abstractmethod
    def _start(self, request: IORequest) -> None:
        """Begin `request`, or queue it; must not block on I/O. What it raises fails the request."""

    @abstractmethod
    def _stop(self) -> None:
        """End all threads, and join them unless `_lost` has calls. Nothing is in flight."""

    def _cut(self, request: IORequest, nbytes: int | None = None) -> list[IOPiece]:
        """Cut a request into pieces of at most `nbytes`, or `io_block_nbytes`."""
        total, step = request.buffer.nbytes, nbytes or self.io_block_nbytes
        pieces = [IOPiece(request, at, min(step, total - at)) for at in range(0, total, step)]
        request.pieces_left = len(pieces)
        pieces[0].begun = True
        return pieces

    def _note_error(self, request: IORequest, error: BaseException) -> None:
        """Remember the first error of a request; other errors than `OffloadError` are wrapped."""
        if request.failure is not None:
            return
        if not isinstance(error, OffloadError):
            wrapped = request.failed(f"{type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        request.failure = Failure(error)

    def _moves(self, piece: IOPiece) -> bool:
        """Record that a call is about to move the piece, or its rest. False where it must not: the
        request has failed meanwhile."""
        with self._books:
            if piece.request.finished:
                return False
            piece.moving = True
            self.watch.began(piece)
            return True

    def _goes_on(self, piece: IOPiece) -> bool:
        """Record that the call has ended and another moves the rest. False where it must not."""
        with self._books:
            self.watch.moved()
            return not piece.given_up

    def _piece_ended(self, piece: IOPiece) -> None:
        """Book a piece that is moved, failed or skipped; the last one finishes the request."""
        request = piece.request
        with self._books:
            if piece.moving:
                piece.moving = False
                self.watch.ended(piece)
            self._lost.discard(piece)
            piece.ended = True
            request.pieces_left -= 1
            last = not request.pieces_left
        if last:
            self._finish(request)

    def _finish(self, request: IORequest) -> None:
        """End a request whose pieces have ended, or were never begun."""
        with self._books:
            if request.finished:  # a request that failed after it was queued
                return
            request.finished = True
        self._end(request)

    def _end(self, request: IORequest) -> None:
        """Run `after`, complete the transfer, count the request off."""
        value: Any = None
        try:
            if request.failure is None and request.after is not None:
                value = request.after()
        except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
            self._note_error(request, error)
        with self._books:
            transfer = self._in_flight[request]
            if request.failure is None:
                self.moved_nbytes[request.operation] += request.buffer.nbytes
        try:
            if request.failure is None:
                transfer.complete(value)
            else:
                transfer.spread(request.failure)
        finally:
            with self._books:
                del self._in_flight[request]
                if not self._in_flight:
                    self._idle.notify_all()

    def _give_up(self) -> None:
        """Fail all requests, present and future: the calls under way do not return."""
        with self._books:
            moving = self.watch.take()
            if not moving:  # they have just returned
                return
            calling = {piece.request for piece in moving}
            waiting = len(self._in_flight) - len(calling)
            error = stuck_error(moving, waiting, self.watch.timeout_s, self.name)
            failure = self._given_up = Failure(error)
            for piece in moving:
                piece.given_up, piece.moving = True, False
            self._lost.update(moving)
            ending = [request for request in self._in_flight if not request.finished]
            for request in ending:
                request.finished, request.failure = True, failure
        _log.error("%s", error)
        for request in ending:
            self._end(request)

    @defer_signals
    def is_lost(self, fd: int) -> bool:
        """Whether a call on `fd` was given up and has not returned, so that it must stay open."""
        with self._books:
            return any(piece.request.fd == fd for piece in self._lost)

    def _check_open(self, request: IORequest) -> None:
        if self._closed:
            raise StateError(f"{request}: the {self.name} backend is closed")
        if os.getpid() != self._pid:
            raise StateError(
                f"{request}: the {self.name} backend belongs to process {self._pid} and has no "
                f"threads in this one ({os.getpid()}); open a new one after fork"
            )
