"""Gives up a device that does not answer, with an error that names it, instead of waiting forever.

A call into the kernel cannot be cancelled. So its waiters get an error, the call keeps its thread,
its memory and its descriptor until it returns, if ever, and no other call uses that path any more:

    moving    ├── call of some seconds ─────┤ ├─────────── call ─────────── ...
    looks        │      │      │      │      │      │  0  │  1  │  2  │ ... │ given up
                                      the last call ended ┘

Time is counted in `look`s, and none happens while this process is stopped or a computer sleeps:
calls that have ended meanwhile are counted before the next one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from offload.swap.io.io_request import IOPiece
from offload.tiers.errors import StuckError
from offload.tiers.units import format_bytes

_log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
LOOKS = 20  # in a row at which nothing had ended on a path, before it is given up
WARN_AT = LOOKS // 3


@dataclass(slots=True)
class _Path:
    """The calls under way on one path."""

    moving: dict[IOPiece, float] = field(default_factory=dict)  # and since when, the oldest first
    ended: int = 0
    seen: int = 0  # of `ended`, at the last look
    looks: int = 0  # since then


class IOWatch:
    """Looks at the calls of one backend, whose lock guards it."""

    def __init__(
        self, timeout_s: float, books: threading.RLock, give_up: Callable[[str], None]
    ) -> None:  # fmt: skip
        """`give_up(path)` is called without the lock when none of the calls on a path, of which
        there are some, has ended for `timeout_s`."""
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}; it has to be positive")
        self.timeout_s = timeout_s
        self._books = books
        self._give_up = give_up
        self._paths: dict[str, _Path] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offload-io-watch", daemon=True)
        self._thread.start()

    # ---- with the lock held

    def began(self, piece: IOPiece) -> None:
        """Record that a call is about to move the piece."""
        path = self._paths.setdefault(piece.request.path, _Path())
        if not path.moving:
            path.looks = 0
        path.moving[piece] = time.monotonic()

    def ended(self, piece: IOPiece) -> None:
        """Record that the call has returned; one that was given up is no longer known here."""
        path = self._paths[piece.request.path]
        if path.moving.pop(piece, None) is not None:
            path.ended += 1

    def moved(self, piece: IOPiece) -> None:
        """Record that the call has moved a part, and that another call moves the rest."""
        self._paths[piece.request.path].ended += 1

    def take(self, name: str) -> dict[IOPiece, float]:
        """The calls under way on a path, and since when (monotonic); they are no longer watched."""
        path = self._paths[name]
        moving, path.moving = path.moving, {}
        return moving

    # ---- the thread

    def look(self) -> None:
        """Find the paths without progress since the last look, log them, and give up stuck ones."""
        slow: list[tuple[str, float]] = []
        stuck: list[str] = []
        with self._books:
            for name, path in self._paths.items():
                if not path.moving or path.ended != path.seen:
                    path.seen, path.looks = path.ended, 0
                    continue
                path.looks += 1
                if path.looks == WARN_AT:
                    slow.append(self._slow(path))
                if path.looks >= LOOKS:
                    stuck.append(name)
        for what, seconds in slow:
            warn_slow(what, seconds, self.timeout_s)
        for name in stuck:
            self._give_up(name)

    def _slow(self, path: _Path) -> tuple[str, float]:
        """The call under way the longest, described, and its duration in seconds."""
        piece, since_s = next(iter(path.moving.items()))
        others = f" and {len(path.moving) - 1} more calls" if len(path.moving) > 1 else ""
        return f"{piece.request.described}{others}", time.monotonic() - since_s

    def _run(self) -> None:
        while not self._closing.wait(self.timeout_s / LOOKS):
            try:
                self.look()
            except (
                RuntimeError,
                OSError,
            ):  # no new thread: the other paths still are
                _log.exception("the watch over files goes on")

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
        f"{request.described} has not ended for {seconds:.3g} s, and nothing else there has for "
        f"{timeout_s:.3g} s (calls of the {backend} backend: {len(moving)}, of "
        f"{format_bytes(nbytes)}; requests behind them: {waiting}): the device or its server does "
        "not answer, see `dmesg`; this path is not used any more: go on from the last checkpoint "
        "with a new engine, once the device answers or with another folder in nvme.paths; where it "
        "is only slow, raise nvme.timeout_s",
        path=request.path, offset_bytes=request.offset_bytes, nbytes=request.buffer.nbytes,
        seconds=seconds,
    )  # fmt: skip
