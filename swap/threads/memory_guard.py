"""Keeps this process from being killed where RAM runs short while it runs.

Plans are held against the machine before anything is allocated; other programs, and what a model
computes with, take memory later. A thread looks at what is left of each limit, and gives up copies
in time:

    left of a limit   ├──────── spare ────────┤├───── reserve ─────┤ 0: the kernel kills
    the host tier     ├─ touched ─┤├ spare/2 ┤ its limit: copies grow to there until the next look
    spare < 0         free pages are given back, then copies, the one used last first, and their
                      pages, until the reserve is whole; what is fetched ahead finds less room
    no copy is left   an error before the next forward, where what may kill is nearer than a quarter
                      of the reserve

Pinned memory (beside a GPU) is not given back: there the tier stops growing. Copies can be made
again from their homes: no bit of a result depends on them. Others' memory can grow as fast as the
kernel clears pages, and the less is left, the sooner comes the next look, of some 0.3 ms.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.swap.states.slot_pool import SlotPool
from offload.swap.threads.shield import defer_signals
from offload.tiers.errors import LowMemoryError, OffloadError
from offload.tiers.units import format_bytes

_log = logging.getLogger("offload")

_FASTEST = 4 << 30  # bytes per second at which others take memory
_LEAST_S, _MOST_S = 0.05, 1.0  # between two looks
_AT_ONCE_NBYTES = 64 << 20  # given back with the lock held
_CALM_S = 30.0  # nothing had to be given up, and it is said that there is room again

_GIVES_BACK = (
    "%s: copies of states give up room, and less is fetched ahead (the host tier takes %s of %s "
    "now); results stay the same, steps get slower; close other programs, or lower budget.host or "
    "the batch"
)
_IS_PINNED = (
    "%s: the host tier is pinned, and grows no more (it takes %s of %s now); close other programs, "
    "or lower budget.host or the batch"
)


@dataclass(frozen=True, slots=True)
class Headroom:
    """The memory left of one limit: of the machine's RAM, or of a cgroup.

    `room_nbytes` can be taken without swapping, `last_nbytes` before something is killed;
    `reserve_nbytes` of the room should stay.
    """

    where: str
    limit_nbytes: int
    room_nbytes: int
    last_nbytes: int
    reserve_nbytes: int

    def __str__(self) -> str:
        of = format_bytes(self.limit_nbytes)
        return f"{self.where}: {format_bytes(self.room_nbytes)} of {of} are left"

    @property
    def spare_nbytes(self) -> int:
        return self.room_nbytes - self.reserve_nbytes

    @property
    def missing_nbytes(self) -> int:
        """The bytes that have to be freed so that no process is killed; 0 if none."""
        return max(0, self.reserve_nbytes // 4 - self.last_nbytes)


@dataclass(frozen=True, slots=True)
class MemoryGuardReport:
    """`limit_nbytes` of the host tier are used for copies and what is needed now; None: all of it.
    `free_nbytes` of `of_nbytes` were left of the tightest limit, `where`, at the last look.
    `given_back_nbytes` of the tier's memory were given back so far, at `times` looks."""

    limit_nbytes: int | None
    free_nbytes: int
    of_nbytes: int
    where: str
    given_back_nbytes: int
    times: int

    def __str__(self) -> str:
        now = "no limit now"
        if self.limit_nbytes is not None:
            now = f"at most {format_bytes(self.limit_nbytes)} of the host tier now"
        return (
            f"{format_bytes(self.given_back_nbytes)} of copies given back for others, {now}; "
            f"{format_bytes(self.free_nbytes)} are left of {self.where}"
        )


class MemoryGuard:
    """Keeps the copies of one pool within the available RAM. `close` ends its thread."""

    def __init__(
        self, pool: SlotPool, read: Callable[[], Sequence[Headroom]], *, sharing: int = 1,
        trim: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """`read` gives all limits as they are now. `sharing` processes guard their own copies side
        by side. `trim` returns memory that the C library keeps."""
        self._pool = pool
        self._read = read
        self._sharing = sharing
        self._trim = trim
        self._looking = threading.Lock()
        self._tightest = Headroom("RAM", 0, 0, 0, 0)
        self._given_back = self._times = 0
        self._held_at: float | None = None  # when something was given up last, until that is over
        self._trimmed_at = -math.inf
        self.short: Headroom | None = None  # nothing is left to give up
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offload-memory", daemon=True)

    def start(self) -> None:
        """Start the thread that looks at the memory left."""
        self._thread.start()

    @defer_signals
    def check(self) -> None:
        """Raise LowMemoryError if the next allocations may get this process killed. Costs nothing
        otherwise."""
        if self.short is None:
            return
        short = self.look()
        if short is None:
            return
        free, limit = format_bytes(short.last_nbytes), format_bytes(short.limit_nbytes)
        raise LowMemoryError(
            f"{short.where}: {free} of {limit} are left, the kernel may kill this process, and no "
            "copies are left to give up; save a checkpoint (where gradients wait, after "
            "optimizer.step() or zero_grad()), close other programs, or go on with less memory: "
            "lower budget.host or the batch, or move a class to nvme",
            free_nbytes=short.last_nbytes,
        )  # fmt: skip

    def report(self) -> MemoryGuardReport:
        at = self._tightest
        return MemoryGuardReport(
            self._pool.limit_nbytes, at.room_nbytes, at.limit_nbytes, at.where, self._given_back,
            self._times,
        )  # fmt: skip

    # ---------------------------------------------------------------- a look
    def look(self) -> Headroom | None:
        """Set the limit by what is left now, and give up what is beyond it. Returns the limit of
        the machine that is about to be passed, if nothing is left to give up."""
        with self._looking:
            limits = self._read()
            self._tightest = at = min(limits, key=lambda each: each.spare_nbytes)
            touched, spare = self._pool.tier.touched_nbytes, at.spare_nbytes
            least = 0 if self._pool.tier.gives_back else touched  # giving up would free nothing
            limit = max(least, touched + (spare // 2 // self._sharing if spare > 0 else spare))
            if spare < 0:
                self._hold(limit, at)
            else:
                self._allow(limit, at)
            self.short = self._short(limits)
            return self.short

    def _hold(self, limit: int, at: Headroom) -> None:
        now, tier = time.monotonic(), self._pool.tier
        before = tier.touched_nbytes
        self._pool.keep_within(limit)
        self.give_back()
        self._given_back += max(0, before - tier.touched_nbytes)
        self._times += 1
        if now - self._trimmed_at >= _MOST_S:
            self._trimmed_at = now
            self._trim()
        if self._held_at is None:
            _log.warning(
                _GIVES_BACK if tier.gives_back else _IS_PINNED,
                f"{at}, {format_bytes(at.reserve_nbytes)} should be",
                format_bytes(tier.touched_nbytes), format_bytes(tier.arena.nbytes),
            )  # fmt: skip
        self._held_at = now

    def _allow(self, limit: int, at: Headroom) -> None:
        budget = self._pool.tier.arena.nbytes
        self._pool.keep_within(limit if limit < budget else None)
        if self._held_at is not None and time.monotonic() - self._held_at >= _CALM_S:
            self._held_at = None
            _log.info(
                "%s: copies of states may take %s of the host tier's %s again",
                at, format_bytes(min(limit, budget)), format_bytes(budget),
            )  # fmt: skip

    def give_back(self) -> None:
        """Give back the RAM of the tier's free ranges. The lock is released between two parts."""
        tier, lock = self._pool.tier, self._pool.lock
        with lock:
            ranges = tier.arena.free_ranges()
        for start, stop in ranges:
            while start < stop:
                end = min(stop, (start // _AT_ONCE_NBYTES + 1) * _AT_ONCE_NBYTES)
                with lock:
                    tier.give_back(start, end)
                start = end

    def _short(self, limits: Sequence[Headroom]) -> Headroom | None:
        worst = max(limits, key=lambda each: each.missing_nbytes)
        if not worst.missing_nbytes:
            return None
        has_more = self._pool.tier.gives_back and self._pool.has_more_to_give()
        return None if has_more else worst

    # ---------------------------------------------------------------- the thread
    def _run(self) -> None:
        wait_s = 0.0
        while not self._closing.wait(wait_s):
            before = self._given_back
            try:
                self.look()
            except ReferenceError:  # the model is gone, and its tiers are being closed
                return
            except (OSError, RuntimeError, ValueError, OffloadError):  # here again next time
                _log.exception("the guard over memory goes on")
            left_s = self._tightest.spare_nbytes / 2 / _FASTEST
            wait_s = min(_MOST_S, max(_LEAST_S, left_s))
            if self._given_back > before:  # what is missing may be more than was seen
                wait_s = 0.0

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
