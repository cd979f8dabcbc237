"""Runs jobs in the order in which they were submitted, on a thread of its own.

For collectives: inputs may arrive in any order, but every rank has to begin collectives in the same
order. The caller goes on; the thread waits for a job's inputs.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from offload.swap.device.streams import WorkStream
from offload.swap.threads.lanes import Lane, WaitFor
from offload.swap.threads.shield import defer_signals, interrupted_in_waits
from offload.swap.threads.transfer import Failure, Transfer
from offload.swap.threads.worker import Worker
from offload.tiers.errors import StateError

T = TypeVar("T")


@dataclass(slots=True)
class _Job:
    run: Callable[[], Any]
    ended: Transfer[Any]


class OrderedWork:
    """Runs jobs one after another. After a failure no job is run any more: every job that is
    waiting, or comes later, fails with the same error."""

    def __init__(self, name: str, device: torch.device) -> None:
        """Starts the thread, which on a GPU has a stream of its own."""
        self.lane = Lane(WaitFor.RANKS)
        self._stream = WorkStream(device)
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._oldest: Transfer[Any] | None = None  # under way
        self._failure: Failure | None = None
        self._closed = False
        self._worker = Worker(name, self._work, self._fail)

    @defer_signals
    def submit(self, what: object, run: Callable[[], T]) -> Transfer[T]:
        """Call `run` after all jobs submitted before; a transfer of its result."""
        ended: Transfer[T] = Transfer(what, self.lane)
        with self._lock:
            if self._closed:
                raise StateError(f"{what} after the end of its thread")
            if self._failure is None:
                self._waiting.append(_Job(run, ended))
        if self._failure is not None:
            ended.spread(self._failure)
        self._worker.wake()
        return ended

    @property
    def pending(self) -> int:
        with self._lock:
            return len(self._waiting) + (self._oldest is not None)

    @interrupted_in_waits
    def await_oldest(self) -> bool:
        """Wait for the oldest job under way; False if there is none, or on the thread itself."""
        with self._lock:
            oldest = self._oldest or (self._waiting[0].ended if self._waiting else None)
        if oldest is None or self._worker.is_this_thread():
            return False
        oldest.wait()
        return True

    @defer_signals
    def drain(self, timeout_s: float) -> None:
        """Wait until all that was submitted has ended, well or not, for `timeout_s` at most."""
        if self._worker.is_this_thread():
            return
        ended = threading.Event()
        self.submit("the end", lambda: None).then(lambda _: ended.set())
        ended.wait(timeout_s)

    def end(self, timeout_s: float) -> None:
        """Wait as `drain` does, before `close`."""
        self.drain(timeout_s)

    def _work(self) -> bool:
        with self._lock:
            if not self._waiting:
                return False
            job = self._waiting.popleft()
            self._oldest = job.ended
        try:
            with self._stream.entered():
                value = job.run()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            job.ended.fail(error)
            assert job.ended.failure is not None, "just failed"
            self._end_with(job.ended.failure)
        else:
            del job.run  # free the objects it refers to before a waiting thread goes on
            job.ended.complete(value)
        with self._lock:
            self._oldest = None
        return True

    def _end_with(self, failure: Failure) -> None:
        with self._lock:
            self._failure = failure
            waiting, self._waiting = list(self._waiting), deque()
        for job in waiting:
            job.ended.spread(failure)

    def _fail(self, error: BaseException) -> None:
        self._end_with(Failure(error))

    @defer_signals
    def close(self) -> None:
        """Stop after the job under way, and wait for the stream's work; jobs that wait fail."""
        with self._lock:
            self._closed = True
        self._end_with(Failure(StateError("the engine is closed")))
        self._worker.close()
        self._stream.close()
