"""Linux native asynchronous I/O by way of the `libaio` package (`pip install offload[aio]`).

One thread submits (and runs `before`), one reaps (and runs `after`); the kernel does the rest. It
is asynchronous with O_DIRECT only: for a buffered file each submission blocks its thread.
"""

from __future__ import annotations

import ctypes
import errno
import heapq
import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from offload.swap.io.io_backend import IO_BLOCK_NBYTES, IOBackend
from offload.swap.io.io_request import IOPiece, IORequest, Operation
from offload.swap.io.io_watch import TIMEOUT_S
from offload.tiers.errors import StorageError, UnsupportedError

_log = logging.getLogger(__name__)

_Entry = tuple[int, int, int, IOPiece]  # priority, sequence, index in its request; smallest first


DEPTH = 8  # requests in the kernel at a time


def import_libaio() -> Any:
    """Import the `libaio` module. Raises UnsupportedError saying what is missing."""
    try:
        import libaio
    except ImportError as error:
        raise UnsupportedError(
            f"nvme.backend: libaio is not installed ({error}); pip install 'offload[aio]', or set "
            "nvme.backend: threads, which is as fast"
        ) from error
    except OSError as error:  # the package is there, the system library is not
        raise UnsupportedError(
            f"nvme.backend: the system library libaio is missing ({error}); install libaio1 "
            "(Debian: libaio1t64), or set nvme.backend: threads, which is as fast"
        ) from error
    return libaio


class LibaioBackend(IOBackend):
    """At most `depth` pieces in the kernel at a time; the others wait here, by priority."""

    name = "libaio"

    def __init__(
        self, *, depth: int = DEPTH, io_block_nbytes: int = IO_BLOCK_NBYTES,
        timeout_s: float = TIMEOUT_S,
    ) -> None:  # fmt: skip
        """Raises UnsupportedError if the package, the library or kernel contexts are missing."""
        if depth < 1:
            raise ValueError(f"depth is {depth}; at least 1 is needed")
        self.depth = depth
        self._libaio = import_libaio()
        self._modes = {
            Operation.READ: self._libaio.AIOBLOCK_MODE_READ,
            Operation.WRITE: self._libaio.AIOBLOCK_MODE_WRITE,
        }
        self._context = self._open_context()
        super().__init__(io_block_nbytes=io_block_nbytes, timeout_s=timeout_s)
        self._changed = threading.Condition()  # guards everything below
        self._queue: list[_Entry] = []
        self._flying: dict[Any, _Entry] = {}  # by AIOBlock: in the kernel, which owns the buffer
        self._left: dict[Any, _Entry] = {}  # the same, given up
        self._submitting: IOPiece | None = None  # the submitting thread is in a call for it
        self._stopping = False
        self._dead = False  # one of our threads has died: nothing can be started
        self._submitter = self._start_thread("submit", self._submit_next)
        self._reaper = self._start_thread("reap", self._reap)

    def _start_thread(self, label: str, step: Callable[[], bool]) -> threading.Thread:
        name = f"offload-aio-{label}"
        thread = threading.Thread(target=self._run, args=(step,), name=name, daemon=True)
        thread.start()
        return thread

    def _open_context(self) -> Any:
        try:
            return self._libaio.AIOContext(self.depth)
        except OSError as error:
            raise UnsupportedError(
                f"nvme.backend: libaio cannot have {self.depth} kernel requests "
                f"({error.strerror or os.strerror(abs(error.errno or 0))}); raise "
                "/proc/sys/fs/aio-max-nr, or set nvme.backend: threads"
            ) from error

    def _start(self, request: IORequest) -> None:
        whole = IOPiece(request, 0, request.buffer.nbytes)
        with self._changed:
            if self._dead:
                raise request.failed("the threads of libaio have died; see the log for the reason")
            heapq.heappush(self._queue, (int(request.priority), request.sequence, 0, whole))
            self._changed.notify_all()

    def _stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in (self._submitter, self._reaper):
            thread.join()
        if not self._left:
            self._context.close()
            return
        # To destroy a context waits for what the kernel has. It stays, also when modules end.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._context))

    def _let_go(self, pieces: Collection[IOPiece]) -> None:
        with self._changed:
            gone = {block: entry for block, entry in self._flying.items() if entry[3] in pieces}
            for block in gone:
                del self._flying[block]
            self._left |= gone
            if self._submitting in pieces:  # it ends where it returns, if ever
                self._submitting = None
                self._submitter = self._start_thread("submit", self._submit_next)
            self._changed.notify_all()

    # ---- both threads

    def _run(self, step: Callable[[], bool]) -> None:
        """Repeat `step` until it says False. A step that raises is a bug: no thread must
        wait for it for ever."""
        try:
            while step():
                pass
        except BaseException as error:  # noqa: BLE001  logged, and all waiters told
            _log.exception("a thread of the libaio backend has died")
            self._abandon(error)

    def _abandon(self, error: BaseException) -> None:
        with self._changed:
            self._dead = True
            # What is in the kernel may still be written to by it; its waiters are told all the
            # same, since no thread is left to tell them later.
            lost = [*self._queue, *self._flying.values()]
            self._queue.clear()
            self._changed.notify_all()
        for *_, piece in lost:
            self._note_error(piece.request, error)
            if not piece.ended:
                self._piece_ended(piece)

    # ---- the submitting thread

    def _submit_next(self) -> bool:
        """Hand one piece to the kernel. Blocks until there is one, and room for it."""
        entry = self._take()
        if entry is None:
            return False
        *order, piece = entry
        request = piece.request
        try:
            if order[2] == 0 and not piece.begun and request.error is None:
                piece = self._open(piece)
            if request.error is None and self._moves(piece):
                return self._hand_over((order[0], order[1], order[2], piece))
        except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
            self._note_error(request, error)
        self._piece_ended(piece)
        return True

    def _take(self) -> _Entry | None:
        with self._changed:
            while not self._queue or len(self._flying) >= self.depth:
                if self._dead or (self._stopping and not self._queue):
                    return None
                self._changed.wait()
            return heapq.heappop(self._queue)

    def _open(self, whole: IOPiece) -> IOPiece:
        """Run `before`, cut the request, queue all pieces but the first and return that."""
        request = whole.request
        self._begin(request)
        first, *others = self._cut(request)
        with self._changed:
            for index, piece in enumerate(others, start=1):
                entry = (int(request.priority), request.sequence, index, piece)
                heapq.heappush(self._queue, entry)
        return first

    def _hand_over(self, entry: _Entry) -> bool:
        """Submit what is left of a piece; retries when the kernel has no room for it just now.
        False where that took so long that another thread submits what comes next."""
        piece = entry[3]
        block = self._libaio.AIOBlock(
            self._modes[piece.request.operation], piece.request.fd,
            [_writable(piece.remaining())], piece.offset_bytes,
        )  # fmt: skip
        with self._changed:
            self._flying[block] = entry  # first: it may be reaped before submit returns
            self._submitting = piece
            self._changed.notify_all()
        refused: BaseException | None = None
        try:
            self._submit_block(block, piece)
        except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
            refused = error
        with self._changed:
            replaced = self._submitting is not piece
            if not replaced:
                self._submitting = None
            if refused is not None:
                self._flying.pop(block, None)
                self._left.pop(block, None)
        if refused is not None:
            self._note_error(piece.request, refused)
            self._piece_ended(piece)
        return not replaced

    def _submit_block(self, block: Any, piece: IOPiece) -> None:
        while True:
            try:
                self._context.submit([block])
            except OSError as error:
                time.sleep(piece.pause_before_retry(_normal(error)))
            else:
                return

    # ---- the reaping thread

    def _reap(self) -> bool:
        """Take finished pieces from the kernel. Blocks until there are some."""
        with self._changed:
            while not self._flying:
                if self._dead or (self._stopping and not self._queue):
                    return False
                self._changed.wait()
        events = self._events()
        with self._changed:  # room for others at once, before any checksum is computed here
            landed = [
                ((self._flying if block in self._flying else self._left).pop(block), result)
                for block, result, _ in events
            ]
            self._changed.notify_all()
        ended = [piece for entry, result in landed if (piece := self._book(entry, result))]
        # all are off the link before any checksum is computed here
        for request in [piece.request for piece in ended if self._count_piece(piece)]:
            self._end(request)
        return True

    def _events(self) -> list[tuple[Any, int, int]]:
        try:
            # The timeout is for a submission that failed: then nothing would come, ever.
            events: list[tuple[Any, int, int]] = self._context.getEvents(1, self.depth, 0.5)
        except OSError as error:
            if _normal(error).errno != errno.EINTR:
                raise
            return []
        return events

    def _book(self, entry: _Entry, result: int) -> IOPiece | None:
        """A piece moved `result` bytes, or -errno: go on with the rest of it. The piece if it has
        ended."""
        piece = entry[3]
        try:
            if result < 0:
                time.sleep(piece.pause_before_retry(OSError(-result, os.strerror(-result))))
            else:
                piece.advance(result)
        except StorageError as error:
            self._note_error(piece.request, error)
        if piece.finished or piece.request.error is not None:  # or it was given up
            return piece
        self._rests(piece)
        with self._changed:
            heapq.heappush(self._queue, entry)
            self._changed.notify_all()
        return None


def _normal(error: OSError) -> OSError:
    """libaio raises OSError(errno, function): put the kernel's words in."""
    number = error.errno or 0
    return OSError(number, os.strerror(number))


def _writable(buffer: memoryview) -> Any:
    """A view that ctypes takes: it refuses read-only memory, though a write only reads it."""
    if not buffer.readonly:
        return buffer
    address = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return (ctypes.c_char * buffer.nbytes).from_address(address)
