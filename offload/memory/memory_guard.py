"""Keeps this process from being killed where RAM runs short while it runs.

Plans are checked against the machine before anything is allocated; other programs, and the model's
activations, take memory later. A thread watches the free memory below each limit (of RAM, of
cgroups), and evicts copies in time:

    free memory       ├──────── spare ────────┤├───── reserve ─────┤ 0: the kernel kills
    the host tier     ├─ touched ─┤├ spare/2 ┤ its limit: copies grow to it until the next check
    spare < 0         free pages are returned to the system, then copies, the one needed last first,
                      and their pages, until the reserve is whole; prefetches find less room

Pinned memory (beside a GPU) is not returned: there the tier stops growing. Copies can be fetched
again from their homes: no bit of a result depends on them.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.process import machine
from offload.swap.states.slot_pool import SlotPool
from offload.tiers.errors import OffloadError
from offload.tiers.units import format_bytes

_log = logging.getLogger("offload")

_ROOT = Path("/")
_SHORT_S, _LONG_S = 0.05, 1.0  # between two checks: while little is free, and otherwise
_NEAR = 4  # little is free: less than so many reserves
_AT_ONCE_NBYTES = 64 << 20  # returned to the system per hold of the lock


@dataclass(frozen=True, slots=True)
class Headroom:
    """The memory left of one limit: of the machine's RAM, or of a cgroup.

    `room_nbytes` can be taken without swapping; `reserve_nbytes` of it should stay.
    """

    where: str
    limit_nbytes: int
    room_nbytes: int
    reserve_nbytes: int

    def __str__(self) -> str:
        of = format_bytes(self.limit_nbytes)
        return f"{self.where}: {format_bytes(self.room_nbytes)} of {of} are left"

    @property
    def spare_nbytes(self) -> int:
        return self.room_nbytes - self.reserve_nbytes


@dataclass(frozen=True, slots=True)
class MemoryGuardReport:
    """`free_nbytes` were left of the tightest limit, `where`, at the last look. `given_back_nbytes`
    of the host tier's memory were given back so far."""

    free_nbytes: int
    where: str
    given_back_nbytes: int

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.given_back_nbytes)} of copies given back for others; "
            f"{format_bytes(self.free_nbytes)} are left of {self.where}"
        )


class MemoryGuard:
    """Keeps the copies of one pool within the available RAM. `close` ends its thread."""

    def __init__(
        self, pool: SlotPool, read: Callable[[], Sequence[Headroom]], *, sharing: int = 1
    ) -> None:
        """`read` gives all limits as they are now. `sharing` processes guard their own copies side
        by side."""
        self._pool = pool
        self._read = read
        self._sharing = sharing
        self._looking = threading.Lock()
        self._tightest = Headroom("RAM", 0, 0, 0)
        self._given_back = 0
        self._trimmed_at = 0.0
        self._has_warned = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offload-memory", daemon=True)

    def start(self) -> None:
        """Start the thread that looks at the memory left."""
        self._thread.start()

    def report(self) -> MemoryGuardReport:
        at = self._tightest
        return MemoryGuardReport(at.room_nbytes, at.where, self._given_back)

    # ---------------------------------------------------------------- a look
    def look(self) -> None:
        """Set the limit by what is left now, and give up what is beyond it."""
        with self._looking:
            tier = self._pool.tier
            self._tightest = at = min(self._read(), key=lambda each: each.spare_nbytes)
            touched, spare = tier.touched_nbytes, at.spare_nbytes
            min_limit = 0 if tier.gives_back else touched  # giving up would free nothing
            limit = max(min_limit, touched + (spare // 2 // self._sharing if spare > 0 else spare))
            self._pool.keep_within(limit if limit < tier.arena.nbytes else None)
            if spare < 0:
                self._warn(at)
                self.give_back()
                # what the C library keeps takes long to give back: once a second at most
                if time.monotonic() - self._trimmed_at >= _LONG_S:
                    self._trimmed_at = time.monotonic()
                    machine.trim_memory()
                self._given_back += max(0, touched - tier.touched_nbytes)

    def _warn(self, at: Headroom) -> None:
        if self._has_warned:
            return
        self._has_warned, tier = True, self._pool.tier
        what = (
            "copies of states give up room, and less is fetched ahead" if tier.gives_back
            else "the host tier is pinned, and grows no more"
        )  # fmt: skip
        _log.warning(
            "%s, %s should be: %s (the host tier takes %s of %s now); results stay the same, steps "
            "get slower; close other programs, or lower budget.host or the batch; said once, "
            "report() has the figures",
            at, format_bytes(at.reserve_nbytes), what, format_bytes(tier.touched_nbytes),
            format_bytes(tier.arena.nbytes),
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

    # ---------------------------------------------------------------- the thread
    def _run(self) -> None:
        wait_s = 0.0
        while not self._closing.wait(wait_s):
            try:
                self.look()
            except ReferenceError:  # the model is gone, and its tiers are being closed
                return
            except (OSError, RuntimeError, ValueError, OffloadError):  # here again next time
                _log.exception("the guard over memory goes on")
            at = self._tightest
            wait_s = _SHORT_S if at.spare_nbytes < _NEAR * at.reserve_nbytes else _LONG_S

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()


# ---------------------------------------------------------------- what is left
def read_headroom(root: Path = _ROOT) -> list[Headroom]:
    """Return what is left of RAM and of each limit of this process's cgroups."""
    total, free = machine.total_memory_nbytes(root), machine.free_memory_nbytes(root)
    ram = Headroom("RAM", total, free, reserve_of(total))
    return [ram, *map(_headroom, machine.memory_limits(root))]


def _headroom(limit: machine.MemoryLimit) -> Headroom:
    size = limit.limit_nbytes
    room = max(0, size - limit.used_nbytes + limit.active_cache_nbytes)
    return Headroom(f"cgroup {limit.folder}", size, room, reserve_of(size))


def reserve_of(limit_nbytes: int) -> int:
    """Return the bytes of a limit that should stay free. Sudden allocations (a worker, a batch) are
    larger on a larger machine; in a small container at most an eighth stays idle."""
    wanted = min(1 << 30, max(64 << 20, limit_nbytes // 50))
    return min(wanted, limit_nbytes // 8)
