"""The use of a link between tiers, as seconds busy, stalled and idle.

    asked for   ├───── write ─────┤         ├── read ──┤    a request is handed over, or held back
    moving           ├── calls ───┤            ├─ call ┤
                ┤ st.├─── busy ───┤── idle ──┤s├─ busy ┤    stalled: asked for, and not moving

The three add up to the time since the link was opened: for a step, take their differences.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.tiers import accelerator

if TYPE_CHECKING:
    import torch

_MOST_COPIES = 64  # that are not counted yet


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Seconds of wall time since a link was opened.

    `busy_s`: something moved. `stalled_s`: nothing did, though something was to: a request was
    handed over, or waited for room in a tier. None where the queue is a driver's, which begins a
    copy as soon as what it waits for on the device is done. `idle_s`: nothing was to be moved.
    """

    busy_s: float
    stalled_s: float | None
    idle_s: float

    def seconds(self) -> dict[str, float]:
        """The known seconds by state: `busy`, `stalled` (unless it is None) and `idle`."""
        stalled = {} if self.stalled_s is None else {"stalled": self.stalled_s}
        return {"busy": self.busy_s, **stalled, "idle": self.idle_s}


class LinkMeter:
    """Counts requests asked for and moving. A clock is read only when the first comes or the last
    goes. Not thread-safe: its owner has a lock."""

    __slots__ = ("_asked", "_busy_s", "_moving", "_now", "_opened_s", "_since_s", "_stalled_s")

    def __init__(self) -> None:
        self._asked = self._moving = 0
        self._now = 0  # 2: busy, 1: stalled, 0: idle
        self._busy_s = self._stalled_s = 0.0
        self._opened_s = self._since_s = time.perf_counter()

    def note(self, *, asked: int = 0, moving: int = 0) -> None:
        """Add to the counts of requests asked for and moving. A moving one stays asked for."""
        self._asked += asked
        self._moving += moving
        now = 2 if self._moving else 1 if self._asked else 0
        if now != self._now:
            self._count(time.perf_counter())
            self._now = now

    def _count(self, until_s: float) -> None:
        spent, self._since_s = until_s - self._since_s, until_s
        if self._now == 2:
            self._busy_s += spent
        elif self._now == 1:
            self._stalled_s += spent

    def use(self) -> LinkUse:
        """The use of the link until now."""
        self._count(time.perf_counter())
        whole = self._since_s - self._opened_s
        return LinkUse(self._busy_s, self._stalled_s, whole - self._busy_s - self._stalled_s)


@dataclass(frozen=True, slots=True)
class _Copy:
    began: accelerator.Event
    ended: accelerator.Event


class CopyTimes:
    """The use of a link by copies that a device makes, on any of its streams: their beginnings and
    ends are events that the device times. A copy counts when it has ended; where copies of several
    streams share the link, each counts in full. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._copies: list[_Copy] = []  # not counted yet
        self._busy_s = 0.0
        self._opened_s = time.perf_counter()

    def mark(self, stream: accelerator.Stream) -> accelerator.Event:
        """An event at the time at which `stream` gets here."""
        event = accelerator.of(self._device).event(self._device, timing=True)
        event.record(stream)
        return event

    def add(self, began: accelerator.Event, ended: accelerator.Event) -> None:
        """Add a copy: all the work between two marks of a stream."""
        with self._lock:
            self._copies.append(_Copy(began, ended))
            if len(self._copies) >= _MOST_COPIES:
                self._look()

    def use(self) -> LinkUse:
        """The use of the link until now, without the copies under way."""
        with self._lock:
            self._look()
            whole = time.perf_counter() - self._opened_s
            busy = min(self._busy_s, whole)
            return LinkUse(busy, None, whole - busy)

    def _look(self) -> None:
        """Count the time of the copies that have ended."""
        under_way = []
        for copy in self._copies:
            if copy.ended.query():
                self._busy_s += copy.began.elapsed_time(copy.ended) * 1e-3
            else:
                under_way.append(copy)
        self._copies = under_way
