"""Gives up a device that does not answer, with an error that names it, instead of waiting forever.

A call into the kernel cannot be cancelled. So its waiters get an error, the call keeps its thread,
its memory and its descriptor until it returns, if ever, and the backend makes no other call any
more. Of several paths a stuck one soon keeps all of them waiting:

    moving    ├── call of some seconds ─────┤ ├─────────── call ─────────── ...
    looks        │      │      │      │      │      │  0  │  1  │  2  │ ... │ given up
                                      the last call ended ┘

Time is counted in `look`s, and none happens while this process is stopped or a computer sleeps:
calls that have ended meanwhile are counted before the next one.
"""

import logging
import threading
import time
from collections.abc import Callable

from offload.swap.io.requests_and_retries import IOPiece
from offload.tiers.errors import StuckError
from offload.tiers.units import format_bytes

_log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
LOOKS = 20  # in a row at which nothing had ended, before the backend is given up
WARN_AT = LOOKS // 3


class IOWatch:
    """Looks at the calls of one backend, whose lock guards it."""

    def __init__(
        self, timeout_s: float, books: threading.RLock, give_up: Callable[[], None]
    ) -> None:  # fmt: skip
        """`give_up()` is called without the lock when none of the calls, of which there are some,
        has ended for `timeout_s`."""
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}; it has to be positive")
        self.timeout_s = timeout_s
        self._books = books
        self._give_up = give_up
        self._moving: dict[IOPiece, float] = {}  # and since when, the oldest first
        self._ended = 0  # calls
        self._seen = 0  # of them, at the last look
        self._looks = 0  # since then
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offload-io-watch", daemon=True)
        self._thread.start()

    # ---- with the lock held

    def began(self, piece: IOPiece) -> None:
        if not self._moving:
            self._looks = 0
        self._moving[piece] = time.monotonic()

    def ended(self, piece: IOPiece) -> None:
        """Record that the call has returned; one that was given up is no longer known here."""
        if self._moving.pop(piece, None) is not None:
            self._ended += 1

    def moved(self) -> None:
        """Record that a call has moved a part, and that another call moves the rest."""
        self._ended += 1

    def take(self) -> dict[IOPiece, float]:
        """The calls under way, and since when (monotonic); they are no longer watched."""
        moving, self._moving = self._moving, {}
        return moving

    # ---- the thread

    def look(self) -> None:
        """See whether there was progress since the last look; if not, log or give up."""
        with self._books:
            if not self._moving or self._ended != self._seen:
                self._seen, self._looks = self._ended, 0
                return
            self._looks += 1
            looks, (piece, since_s) = self._looks, next(iter(self._moving.items()))
            others = f" and {len(self._moving) - 1} more calls" if len(self._moving) > 1 else ""
        if looks == WARN_AT:
            seconds = time.monotonic() - since_s  # of the call under way the longest
            warn_slow(f"{piece.request}{others}", seconds, self.timeout_s)
        if looks >= LOOKS:
            self._give_up()

    def _run(self) -> None:
        while not self._closing.wait(self.timeout_s / LOOKS):
            self.look()

    def close(self) -> None:
        self._closing.set()
        if threading.get_ident() != self._thread.ident:
            self._thread.join()


def warn_slow(what: object, seconds: float, timeout_s: float) -> None:
    _log.warning(
        "%s: not ended for %.3g s; see `dmesg`; an error after %.3g s (nvme.timeout_s)",
        what, seconds, timeout_s,
    )  # fmt: skip


def stuck_error(
    moving: dict[IOPiece, float], waiting: int, timeout_s: float, backend: str
) -> StuckError:
    """The error of calls that were given up, and of `waiting` requests behind them."""
    piece, since_s = next(iter(moving.items()))
    request, seconds = piece.request, time.monotonic() - since_s
    nbytes = sum(each.nbytes for each in moving)
    return StuckError(
        f"{request} has not ended for {seconds:.3g} s, and nothing else has for "
        f"{timeout_s:.3g} s (calls of the {backend} backend: {len(moving)}, of "
        f"{format_bytes(nbytes)}; requests behind them: {waiting}): the device or its server does "
        "not answer, see `dmesg`; no swap file is used any more: go on from the last checkpoint "
        "with a new engine, once the device answers or with another folder in nvme.paths; where it "
        "is only slow, raise nvme.timeout_s",
        path=request.path, offset_bytes=request.offset_bytes, nbytes=request.buffer.nbytes,
        seconds=seconds,
    )  # fmt: skip
