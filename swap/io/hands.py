"""Calls of the system that may never return, made by threads that can be left behind: all calls on
checkpoints, and rare calls on swap files, whose reads and writes `io_watch` watches.

A disk or a server that does not answer keeps the thread that asks, and the kernel has no way to
take a call back. So another thread asks, a *hand*, one call at a time:

    caller   ├─ asks ─┤ waits ............... │ the result or, after `timeout_s`, a StuckError
    hand              ├──────── call ──────── ...

A call that was left keeps its hand, its memory and its descriptor until it returns, if ever. It may
change names yet: `when_returned` says so, and puts off what lets others in until then. Time is
counted in looks, and none passes while this process is stopped or a computer sleeps. Where no
thread can be had, the caller's own makes the call.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from offload.swap.io.io_watch import LOOKS, TIMEOUT_S, WARN_AT, warn_slow
from offload.swap.threads.latch import Latch
from offload.swap.threads.shield import defer_signals
from offload.tiers.errors import StuckError
from offload.tiers.units import format_bytes

R = TypeVar("R")

_LOOK_S = 1.0  # at most: a Ctrl-C that comes just before one begins is raised at its end
_PATIENCE_S = 5.0  # of a Ctrl-C, with the call that is under way

_left: set[Call[Any]] = set()  # calls that were given up, until they return
os.register_at_fork(after_in_child=_left.clear)  # where none of them ever does
_here = threading.local()  # of a hand: the call that it makes
_timeout_s: ContextVar[float | None] = ContextVar("timeout_s", default=None)


@contextmanager
def waiting(timeout_s: float) -> Iterator[None]:
    """Set the seconds that hands made inside wait for each call."""
    token = _timeout_s.set(timeout_s)
    try:
        yield
    finally:
        _timeout_s.reset(token)


def make_call(operation: str, path: Path, function: Callable[..., R], *args: Any) -> R:
    """Make a call in the hand's thread. Tests replace this function with one that fails;
    `operation` and `path` describe the call."""
    return function(*args)


def hand_call() -> Call[Any]:
    """The call that this thread, a hand, makes."""
    found: Call[Any] = _here.call
    return found


class Call(Generic[R]):
    """One call. `result` or `error` holds once it has returned."""

    stuck_message = (
        "%s has not ended for %.3g s: the device or its server does not answer, see `dmesg`; what "
        "was complete before is there; go on once the device answers, or with a folder on another "
        "one; where it is only slow, raise nvme.timeout_s"
    )

    def __init__(
        self, operation: str, path: str | os.PathLike[str], function: Callable[..., R], *args: Any,
        offset_bytes: int = 0, nbytes: int = 0,
    ) -> None:  # fmt: skip
        self.operation = operation
        self.path = Path(path)
        self.offset_bytes = offset_bytes
        self.nbytes = nbytes
        self.result: R
        self.error: BaseException | None = None
        self.is_asked = False
        self.has_returned = self._has_begun = False
        self.over = Latch()  # it has returned, or is not waited for any more
        self._make = function, args
        self._began_s = time.monotonic()
        self._then: list[Callable[[], None]] = []
        self._books = threading.Lock()

    def run(self) -> None:
        """Make the call, in the hand's thread."""
        with self._books:
            if self.has_returned:  # it was taken back
                return
            self._has_begun = True
        _here.call = self
        function, args = self._make
        try:
            self.result = make_call(self.operation, self.path, function, *args)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self.error = error
        with self._books:
            self.has_returned = True
        self.over.open()
        _here.call = None  # memory that it has moved is not held until the next one
        for then in self._then:
            then()
        _left.discard(self)

    def when_returned(self, function: Callable[[], None]) -> bool:
        """Call `function` in the call's thread once it has returned. Returns False, without calling
        it, if it has already returned."""
        with self._books:
            if not self.has_returned:
                self._then.append(function)
            return not self.has_returned

    def take_back(self) -> bool:
        """Cancel the call; False if it has begun."""
        with self._books:
            if self._has_begun:
                return False
            self.has_returned = True
        self.over.open()
        return True

    def give_up(self) -> None:
        """Give the call up: no thread waits for it any longer."""
        with self._books:
            if not self.has_returned:
                _left.add(self)
        self.over.open()

    def wait(self, timeout_s: float) -> None:
        """Wait until the call is over, for `timeout_s` at most."""
        looks = max(LOOKS, math.ceil(timeout_s / _LOOK_S))
        for look in range(1, looks + 1):
            if self.over.wait(timeout_s / looks):
                return
            if look == looks * WARN_AT // LOOKS:
                warn_slow(self, time.monotonic() - self._began_s, timeout_s)

    def stuck(self) -> StuckError:
        """The error of a call that was given up, and of those that come after it."""
        seconds = time.monotonic() - self._began_s
        return StuckError(
            self.stuck_message % (self, seconds),
            path=str(self.path), offset_bytes=self.offset_bytes, nbytes=self.nbytes,
            seconds=seconds,
        )  # fmt: skip

    def __str__(self) -> str:
        where = f" ({format_bytes(self.nbytes)} at byte {self.offset_bytes})" if self.nbytes else ""
        return f"{self.operation} of {self.path}{where}"


class Hand:
    """A thread that makes calls for one caller at a time, in order. It ends with this object, once
    the calls that it was asked for have returned."""

    _asked: SimpleQueue[Call[Any] | None] | None = None

    def __init__(self, timeout_s: float | None = None) -> None:
        """`timeout_s`: the limit for each call; by default that of `waiting`."""
        self._asked = SimpleQueue()
        self._stuck: Call[Any] | None = None
        self._last: Call[Any] | None = None  # that was asked for
        self._timeout_s = timeout_s or _timeout_s.get()
        self._pid = os.getpid()
        self._thread = _started(self._asked)

    def end(self) -> None:
        """Let the thread end behind the calls that it was asked for, and wait for that, a little,
        unless something does not return."""
        if self._asked is None:
            return
        self._asked.put(None)
        self._asked = None  # not before: what a Ctrl-C cuts short, __del__ repeats
        if self._last is not None and not _left:
            self._last.over.wait(_PATIENCE_S)
            self._leave_unless_returned(self._last)
        if self._stuck is None and not _left and self._thread and not sys.is_finalizing():
            self._thread.join(_PATIENCE_S)

    def __del__(self) -> None:
        if self._asked is not None:  # may be called amid any wait: waits for nothing
            self._asked.put(None)

    @property
    def is_here(self) -> bool:
        """Whether this process has the thread; a forked child does not."""
        return self._pid == os.getpid()

    def make(
        self, operation: str, path: Path, function: Callable[..., R], *args: Any,
        offset_bytes: int = 0, nbytes: int = 0,
    ) -> R:  # fmt: skip
        """The result of `function(*args)`, or its error. StuckError if it does not return in time,
        or an earlier one has not. A Ctrl-C is raised when the call has returned, or soon."""
        call = Call(operation, path, function, *args, offset_bytes=offset_bytes, nbytes=nbytes)
        return self.result(call)

    def ask(self, call: Call[Any]) -> None:
        """Queue the call behind all others, without waiting for it."""
        assert self._asked is not None, "it has not ended"
        self._last = call
        call.is_asked = True
        if self._thread is None or sys.is_finalizing():  # when no other thread comes to run
            call.run()
        else:
            self._asked.put(call)

    def result(self, call: Call[R]) -> R:
        """The result of a call that was queued before, in the order of queueing, or is queued now.
        Raises like `make`."""
        if self._stuck is not None:
            raise self._stuck.stuck()
        try:
            if not call.is_asked:
                self.ask(call)
            call.wait(self._timeout_s or TIMEOUT_S)
        except BaseException:
            self._hurry(call)
            raise
        self._leave_unless_returned(call)
        if self._stuck is not None:
            raise call.stuck()
        if call.error is not None:
            try:
                raise call.error
            finally:
                call.error = None  # its traceback leads to the call, and so to the caller's memory
        return call.result

    def _hurry(self, call: Call[Any]) -> None:
        if call.take_back():
            return
        try:
            call.over.wait(_PATIENCE_S)
        finally:  # another Ctrl-C may end that
            self._leave_unless_returned(call)

    def _leave_unless_returned(self, call: Call[Any]) -> None:
        call.give_up()
        if not call.has_returned:
            self._stuck = call


def _started(asked: SimpleQueue[Call[Any] | None]) -> threading.Thread | None:
    """A hand's thread. None where none can be started, as where a limit is reached, or none comes
    to run, as Python ends."""
    if sys.is_finalizing():
        return None
    thread = threading.Thread(target=_work, args=(asked,), name="offload-call", daemon=True)
    try:
        with defer_signals:
            thread.start()
    except RuntimeError:
        return None
    return thread


def _work(asked: SimpleQueue[Call[Any] | None]) -> None:
    while True:
        call = asked.get()
        if call is None:
            return
        call.run()
        del call  # with its memory


def result_of(call: Call[R], timeout_s: float | None = None) -> R:
    """The result of one call, made by a hand of its own. Raises like `Hand.make`."""
    hand = Hand(timeout_s)
    try:
        return hand.result(call)
    finally:
        hand.end()


def patiently(operation: str, path: Path, function: Callable[..., R], *args: Any) -> R:
    """The result of one call, like `result_of`, for callers that need only the result."""
    return result_of(Call(operation, path, function, *args))


def when_returned(
    function: Callable[[], None], below: Path, operations: Collection[str] | None = None
) -> bool:
    """Call `function` when all of the calls (of some `operations`) that were left at or below a
    path have returned. False, and it is not called, if there are none."""

    def again() -> None:
        if not when_returned(function, below, operations):
            function()

    return any(
        call.when_returned(again)
        for call in list(_left)
        if call.path.is_relative_to(below)
        and (operations is None or call.operation in operations)
    )  # fmt: skip
