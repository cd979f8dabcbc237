"""Lanes: what moves or works beside the model's thread, and how long that thread has waited for it.

    model's thread   ── forward ──┤ waits ├── forward ──┤ waits ├──
    a lane           ─────┤ read of block 3 ├───┤ update of block 4 ├──

Each thing that a thread may have to wait for is of a lane. A clock is read only where a thread does
wait. One thread waits for one thing at a time, so no second is counted twice; a wait for an update
that itself waits for files is one for the update.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class WaitFor(enum.StrEnum):
    """What the model's thread may wait for."""

    FILES = "nvme"
    LINK = "link"  # a copy between host and device
    UPDATE = "update"  # of a group that is used next
    RANKS = "ranks"


class _ThisThread(threading.local):
    is_worker = False


_this_thread = _ThisThread()


def be_worker() -> None:
    """This thread works for the model's: it may wait, and nobody's training stands still."""
    _this_thread.is_worker = True


class Lane:
    """One of them. The waits of threads that are no workers are counted: of the model's thread, one
    at a time."""

    __slots__ = ("kind", "waited_s")

    def __init__(self, kind: WaitFor) -> None:
        self.kind = kind
        self.waited_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited(began)

    def waited(self, began: float) -> None:
        """A wait ends now that began then, by `time.perf_counter`."""
        if not _this_thread.is_worker:
            self.waited_s += time.perf_counter() - began


def waits_s(lanes: Iterable[Lane]) -> dict[str, float]:
    """Seconds waited so far, for each `WaitFor`."""
    found = dict.fromkeys(map(str, WaitFor), 0.0)
    for lane in lanes:
        found[lane.kind] += lane.waited_s
    return found
