"""Threads for arithmetic: a runner that shares one kernel call, a worker that keeps a queue going.

Kernels release the GIL, so plain threads give true parallelism, and no parallel runtime (OpenMP,
TBB) has to survive beside PyTorch's own.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

_MIN_SHARE = 1 << 16  # elements; waking a thread costs more than it does for fewer


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


class ParallelRunner:
    """Runs a body over a range on several threads: `runner(body, n)` covers `range(n)` once.

    Ranges are contiguous and as equal as whole multiples of `grain` allow. Returns when all are
    done; raises the first error. Usable from several threads at once.
    """

    def __init__(self, threads: int, *, grain: int = 1, min_share: int = _MIN_SHARE) -> None:
        self.threads = threads
        self._grain = grain
        self._min_share = min_share
        self._pool = (
            ThreadPoolExecutor(threads - 1, thread_name_prefix="offload-kernel")
            if threads > 1
            else None
        )

    def sharing(self, min_share: int) -> ParallelRunner:
        """A runner on the same threads, for bodies whose elements are worth more or less."""
        runner = copy.copy(self)
        runner._min_share = min_share
        return runner

    def __call__(self, body: Callable[[int, int], None], n: int) -> None:
        shares = min(self.threads, max(1, n // self._min_share))
        if self._pool is None or shares == 1:
            body(0, n)
            return
        step = -(-n // shares)
        step = -(-step // self._grain) * self._grain
        starts = range(0, n, step)
        others = [self._pool.submit(body, start, min(start + step, n)) for start in starts[1:]]
        body(0, min(step, n))
        wait(others)
        for other in others:
            other.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)


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
        self._wanted = threading.Event()
        self._closing = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._wanted.set()

    def _loop(self) -> None:
        try:
            while not self._closing:
                self._wanted.wait()
                self._wanted.clear()
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
