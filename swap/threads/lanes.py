"""Lanes: what moves or works beside the model's thread, and how long that thread has waited for it.

    model's thread   ── forward ──┤ waits ├── forward ──┤ waits ├──
    a lane           ─────┤ read of block 3 ├───┤ update of block 4 ├──

Each thing that a thread may have to wait for is of a lane. No clock is read for a transfer that is
done. One thread waits for one thing at a time, so no second is counted twice; a wait for an update
that itself waits for files is one for the update.
"""

import enum
import functools
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


class WaitFor(enum.StrEnum):
    """The kinds of work that the model's thread may wait for."""

    FILES = "nvme"
    LINK = "link"  # a copy between host and device
    UPDATE = "update"  # of a group that is used next
    RANKS = "ranks"


class _ThisThread(threading.local):
    is_worker = False


_this_thread = _ThisThread()


def be_worker() -> None:
    """Mark this thread as a worker: its waits do not delay training, and are not counted."""
    _this_thread.is_worker = True


def is_worker() -> bool:
    return _this_thread.is_worker


class Lane:
    """One lane. The waits of threads that are no workers are counted: those of the model's thread,
    one at a time."""

    __slots__ = ("kind", "waited_s")

    def __init__(self, kind: WaitFor) -> None:
        self.kind = kind
        self.waited_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with profiled(f"wait for {self.kind}"):
                yield
        finally:
            ended = time.perf_counter()
            if not is_worker():
                self.waited_s += ended - began


def waits_s(lanes: Iterable[Lane]) -> dict[str, float]:
    """Seconds waited so far, for each `WaitFor`."""
    waited_s = dict.fromkeys(map(str, WaitFor), 0.0)
    for lane in lanes:
        waited_s[lane.kind] += lane.waited_s
    return waited_s


_NOTHING = nullcontext()


@functools.cache
def _torch() -> Any:
    from torch.autograd import profiler  # memest plans with these modules and without it

    return profiler


def profiled(name: str) -> AbstractContextManager[Any]:
    """A context around a phase, which `torch.profiler` shows as `offload: NAME`. While no profiler
    runs, only a flag is read.

    The flag is the process's: `_profiler_enabled()` covers the calling thread only, and is False on
    every one while a profiler records all of them. By default a profiler sees the thread that
    started it, and backward; `profile_all_threads` in its `experimental_config` adds the runtime's.
    """
    profiler = _torch()
    if not profiler._is_profiler_enabled:
        return _NOTHING
    shown: AbstractContextManager[Any] = profiler.record_function(f"offload: {name}")
    return shown
