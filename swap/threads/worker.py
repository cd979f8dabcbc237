"""Threads: a runner that shares one kernel call, a worker that keeps a queue going, one for a call.

Kernels release the GIL, so plain threads give true parallelism, and no parallel runtime (OpenMP,
TBB) has to survive beside PyTorch's own.
"""

from __future__ import annotations

import copy
import itertools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from offload.swap.threads.lanes import be_worker
from offload.swap.threads.shield import defer_signals
from offload.swap.threads.transfer import Transfer

R = TypeVar("R")

_MIN_SHARE = 1 << 16  # elements; waking a thread costs more than it does for fewer


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


class ParallelRunner:
    """Runs a body over a range on several threads: `runner(body, n)` covers `range(n)` once.

    Ranges are contiguous and about equal. Returns when all are done; raises the first error. Usable
    from several threads at once.
    """

    def __init__(self, threads: int, *, min_share: int = _MIN_SHARE) -> None:
        self.threads = threads
        self._min_share = min_share
        self._team = _Team(threads - 1)

    def sharing(self, min_share: int) -> ParallelRunner:
        """A runner on the same threads, for bodies whose elements are worth more or less."""
        runner = copy.copy(self)
        runner._min_share = min_share
        return runner

    def __call__(self, body: Callable[[int, int], None], n: int) -> None:
        shares = min(self.threads, max(1, n // self._min_share))
        if shares == 1:
            body(0, n)
            return
        step = -(-n // shares)
        self._team.share(body, [(start, min(start + step, n)) for start in range(0, n, step)])

    def close(self) -> None:
        self._team.close()


class _Call:
    """A body and its ranges, each run by one thread; the last one to end wakes the caller."""

    def __init__(self, body: Callable[[int, int], None], count: int) -> None:
        self._body = body
        self._count = count
        self._ended = itertools.count(1)  # its next() is atomic
        self._all_ended = threading.Lock()
        self._all_ended.acquire()
        self._error: BaseException | None = None

    def run(self, start: int, stop: int) -> None:
        try:
            self._body(start, stop)
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            self._error = self._error or error
        if next(self._ended) == self._count:
            self._all_ended.release()

    def wait(self) -> None:
        self._all_ended.acquire()
        if self._error is not None:
            raise self._error


class _Team:
    """Threads that wait for ranges, started with the first call.

    A range costs a thread a few microseconds of the interpreter. Those of an executor's futures
    cost ten times as much, and sixteen threads waited for each other's: a chunk of a million
    elements took five times as long as its arithmetic.
    """

    def __init__(self, threads: int) -> None:
        self._ranges: queue.SimpleQueue[tuple[_Call, int, int] | None] = queue.SimpleQueue()
        self._wanted = threads
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._lock = threading.Lock()
        # Not when the interpreter ends: engines that are closed then still share.
        weakref.finalize(self, _end, self._ranges, threads).atexit = False

    def share(self, body: Callable[[int, int], None], ranges: Sequence[tuple[int, int]]) -> None:
        """Run the first range here, the others on the threads. RuntimeError once it is closed."""
        call = _Call(body, len(ranges))
        with self._lock:  # what is put comes before the end that `close` puts
            self._start()
            for start, stop in ranges[1:]:
                self._ranges.put((call, start, stop))
        call.run(*ranges[0])
        call.wait()

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError("the runner is closed: its threads have ended")
        while len(self._threads) < self._wanted:
            thread = threading.Thread(
                target=_serve, args=(self._ranges,), name="offload-kernel", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """End the threads, once nothing is shared any more."""
        with self._lock:
            threads, self._threads = self._threads, []
            self._closed = True
        _end(self._ranges, len(threads))
        for thread in threads:
            thread.join()


def _serve(ranges: queue.SimpleQueue[tuple[_Call, int, int] | None]) -> None:
    while (item := ranges.get()) is not None:
        call, start, stop = item
        call.run(start, stop)
        del item, call  # a body refers to a chunk's memory


def _end(ranges: queue.SimpleQueue[tuple[_Call, int, int] | None], count: int) -> None:
    for _ in range(count):
        ranges.put(None)


class Worker:
    """A thread that calls `work()` again and again while it returns True, then sleeps.

    `wake()` makes it look again. An error ends the loop: `failure` keeps it and `on_failure` is
    told, so that threads that wait for this worker's results can be woken instead of hanging.
    """

    def __init__(
        self, name: str, work: Callable[[], bool], on_failure: Callable[[BaseException], None]
    ) -> None:
        self._work = work
        self._on_failure = on_failure
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # an event's are Python's, slow
        self._closing = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._wakes.put(None)

    def _loop(self) -> None:
        be_worker()
        try:
            while not self._closing:
                self._wakes.get()
                while not self._wakes.empty():  # one look is enough for all until here
                    self._wakes.get()
                while not self._closing and self._work():
                    pass
        except BaseException as error:  # noqa: BLE001 - kept, and raised where it is waited for
            self.failure = error
            self._on_failure(error)

    def is_this_thread(self) -> bool:
        """Whether the caller runs within `work`."""
        return threading.get_ident() == self._thread.ident

    def close(self) -> None:
        """Stop after the call of `work` under way; waits for the thread to end."""
        self._closing = True
        self.wake()
        if not self.is_this_thread():
            self._thread.join()


@defer_signals
def in_thread(name: str, function: Callable[..., R], *args: Any) -> Transfer[R]:
    """Call `function` on a thread of its own, for whose end a program waits; a transfer of its
    result. RuntimeError if no thread can be had."""
    ended: Transfer[R] = Transfer(name)

    def run() -> None:
        be_worker()
        try:
            value = function(*args)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            ended.fail(error)
        else:
            ended.complete(value)

    threading.Thread(target=run, name=name).start()
    return ended
