"""The default backend: a few threads in `preadv` and `pwritev`, which release the GIL.

With 8 to 16 MiB per call this is as fast as any asynchronous interface, needs nothing but
Linux, and works with buffered files as well.
"""

import heapq
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence

from offload.swap.io.io_backend import IO_BLOCK_NBYTES, IOBackend, Priority
from offload.swap.io.io_watch import TIMEOUT_S
from offload.swap.io.requests_and_retries import IOPiece, IORequest, Operation
from offload.swap.threads.lanes import profiled
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import round_up

_log = logging.getLogger(__name__)

WORKERS = 6  # 6 x 8 MiB keep a device busy
_MIN_SHARE_NBYTES = 512 << 10  # smallest part of an urgent read: smaller calls lose bandwidth

# os.preadv and os.pwritev, or something in their place that fails on purpose
VectorCall = Callable[[int, Sequence[memoryview], int], int]


class ThreadsBackend(IOBackend):
    """`workers` daemon threads on one priority queue of pieces.

    A request is cut when its first piece is begun, so `before` runs once and ahead of all of
    them; the other pieces then go to the head of their priority and idle workers join in.

    An urgent read is cut at once, into a piece for each worker: of several (the experts of a layer)
    the first then arrives first, and computes while the others do. Side by side they would share
    the device and arrive all at the end.
    """

    name = "threads"

    def __init__(
        self, *, workers: int = WORKERS, io_block_nbytes: int = IO_BLOCK_NBYTES,
        timeout_s: float = TIMEOUT_S, preadv: VectorCall = os.preadv,
        pwritev: VectorCall = os.pwritev,
    ) -> None:  # fmt: skip
        if workers < 1:
            raise ValueError(f"workers is {workers}; at least 1 is needed")
        super().__init__(io_block_nbytes=io_block_nbytes, timeout_s=timeout_s)
        self._calls = {Operation.READ: preadv, Operation.WRITE: pwritev}
        self._lock = threading.Lock()  # guards the queue and the threads
        self._queue: list[tuple[int, int, int, IOPiece]] = []
        # True for each piece that is queued, for whichever worker comes first; False ends a worker
        self._ready: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._workers = workers
        self._threads: list[threading.Thread] = []
        for number in range(workers):
            name = f"offload-io-{number}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _start(self, request: IORequest) -> None:
        urgent = request.priority is Priority.URGENT and request.before is None
        if urgent and request.buffer.nbytes > _MIN_SHARE_NBYTES:
            pieces = self._cut(request, self._share_of(request))
        else:
            # Provisional, holds the place in the queue: cut for good by the worker that takes it.
            pieces = [IOPiece(request, 0, request.buffer.nbytes)]
        self._put(pieces, 0)

    def _put(self, pieces: Sequence[IOPiece], first: int) -> None:
        """Queue pieces of a request, whose indices in it count from `first`."""
        with self._lock:
            for index, piece in enumerate(pieces, first):
                request = piece.request
                heapq.heappush(self._queue, (request.priority, request.sequence, index, piece))
        for _ in pieces:
            self._ready.put(True)

    def _share_of(self, request: IORequest) -> int:
        share = round_up(-(-request.buffer.nbytes // self._workers), PAGE_NBYTES)
        return min(max(share, _MIN_SHARE_NBYTES), self.io_block_nbytes)

    def _stop(self) -> None:
        for _ in self._threads:  # no piece is queued any more: nothing is in flight
            self._ready.put(False)
        for thread in () if self._lost else self._threads:
            if thread.ident != threading.get_ident():
                thread.join()

    # ---- in the workers

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            index, piece = taken
            try:
                self._serve(index, piece)
            except BaseException as error:  # noqa: BLE001  a bug: logged, and raised in waiters
                _log.exception("an I/O thread of the %s backend goes on", self.name)
                if not piece.ended:
                    self._note_error(piece.request, error)
                    self._piece_ended(piece)

    def _take(self) -> tuple[int, IOPiece] | None:
        """The next piece and its index in its request; None to end. Blocks while there is none."""
        if not self._ready.get():
            return None
        with self._lock:
            _, _, index, piece = heapq.heappop(self._queue)
        return index, piece

    def _serve(self, index: int, piece: IOPiece) -> None:
        """Move one piece. Any error is the request's, never the thread's."""
        try:
            if index == 0 and piece.request.failure is None:
                piece = self._open(piece)
            if piece.request.failure is None and self._moves(piece):
                with profiled(f"nvme {piece.request.operation} of {piece.request.owner}"):
                    self._move(piece)
        except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
            self._note_error(piece.request, error)
        self._piece_ended(piece)

    def _open(self, whole: IOPiece) -> IOPiece:
        """Run `before`, cut the request, queue all pieces but the first and return that."""
        request = whole.request
        if request.before is not None:
            request.before()
        if whole.begun or whole.nbytes <= self.io_block_nbytes:  # cut already, or as it is
            return whole
        first, *others = self._cut(request)
        self._put(others, 1)
        return first

    def _move(self, piece: IOPiece) -> None:
        """Call until the piece is moved, or raise the typed error. Blocks on the device."""
        call, fd = self._calls[piece.request.operation], piece.request.fd
        while not piece.finished:
            try:
                count = call(fd, [piece.remaining()], piece.offset_bytes)
            except OSError as error:
                time.sleep(piece.pause_before_retry(error))
            else:
                piece.advance(count)
            if not piece.finished and not self._goes_on(piece):
                return  # its file may be closed, and its memory be another's
