"""Calls of the system that may never return, made by threads that can be left behind.

A disk or a server that does not answer keeps the thread that asks, and the kernel has no way to
take a call back. So another thread asks, a *hand*, one call at a time:

    caller   ├─ asks ─┤ waits ............... │ the result or, after `timeout_s`, a StuckError
    hand              ├──────── call ──────── ...

A call that was left keeps its hand, its memory and its descriptor until it returns, if ever. It may
change names yet: `when_returned` says so, and puts off what lets others in until then. Time is
counted in looks, and none passes while this process is stopped or a computer sleeps.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from offload.swap.latch import Latch
from offload.swap.shield import uninterrupted
from offload.tiers.errors import StuckError
from offload.tiers.units import format_bytes

R = TypeVar("R")

TIMEOUT_S = 30.0  # that of `nvme.timeout_s`; data goes in calls of few MiB (`disk`)
_WARN = 1 / 3  # of it
_LOOK_S = 1.0
_PATIENCE_S = 5.0  # of a Ctrl-C, with the call that is under way

_log = logging.getLogger("offload")
_books = threading.Lock()
_left: set[Call] = set()  # calls that nobody waits for any more, until they return
_here = threading.local()  # of a hand: the call that it makes
_timeout_s: ContextVar[float | None] = ContextVar("timeout_s", default=None)


def _begin_anew() -> None:
    """In a forked child, which has no hands: one of them may have held the lock."""
    global _books
    _books = threading.Lock()
    _left.clear()


os.register_at_fork(after_in_child=_begin_anew)


@contextmanager
def waiting(timeout_s: float) -> Iterator[None]:
    """Hands that are made inside wait so long for each call."""
    token = _timeout_s.set(timeout_s)
    try:
        yield
    finally:
        _timeout_s.reset(token)


def make_call(operation: str, path: Path, function: Callable[..., R], *args: Any) -> R:
    """Every call of the system that a checkpoint needs, in the hand's thread. Tests put one in its
    place that fails; `operation` and `path` say what it is."""
    return function(*args)


def hand_call() -> Call:
    """The call that this thread, a hand, makes."""
    found: Call = _here.call
    return found


class Call:
    """One call. `result` and `error` hold once it is done."""

    def __init__(
        self, operation: str, path: Path, function: Callable[..., Any], args: tuple[Any, ...],
        offset_bytes: int, nbytes: int,
    ) -> None:  # fmt: skip
        self.operation = operation
        self.path = path
        self.offset_bytes = offset_bytes
        self.nbytes = nbytes
        self.result: Any = None
        self.error: BaseException | None = None
        self.then: list[Callable[[], None]] = []
        self.is_asked = False
        self._make = function, args
        self._began_s = time.monotonic()
        self._over = Latch()  # it has returned, or is not waited for any more
        self._begun = self._returned = False

    def run(self) -> None:
        """In the hand's thread."""
        with _books:
            if self._returned:  # it was taken back
                return
            self._begun = True
        _here.call = self
        function, args = self._make
        try:
            self.result = make_call(self.operation, self.path, function, *args)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self.error = error
        with _books:
            self._returned = True
        self._over.open()
        _here.call = None  # memory that it has moved is not held until the next one
        while then := self._then():
            for function in then:
                function()

    def _then(self) -> list[Callable[[], None]]:
        """What waits for it. If nothing does, it is over for everybody."""
        with _books:
            then, self.then = self.then, []
            if not then:
                _left.discard(self)
        return then

    def take_back(self) -> bool:
        """Let it not be made; False if it has begun."""
        with _books:
            if self._begun:
                return False
            self._returned = True
        self._over.open()
        return True

    def give_up(self) -> None:
        """Let nobody wait for it any longer."""
        with _books:
            if not self._returned:
                _left.add(self)
        self._over.open()

    def wait(self, timeout_s: float) -> None:
        """Until it is over, at most so long. An error is to come after that: a warning says so."""
        warn_at = timeout_s * _WARN
        looked = 0.0
        while not self._over.wait(_LOOK_S) and looked < timeout_s:
            looked += _LOOK_S
            if looked >= warn_at:
                warn_at = timeout_s + 1
                _log.warning(
                    "%s: not ended for %.3g s; see `dmesg`; an error after %.3g s "
                    "(nvme.timeout_s)", self, looked, timeout_s,
                )  # fmt: skip

    def wait_a_little(self) -> None:
        """Until it is over, or a Ctrl-C has waited long enough."""
        self._over.wait(_PATIENCE_S)

    @property
    def has_returned(self) -> bool:
        with _books:
            return self._returned

    def stuck(self) -> StuckError:
        """The error of a call that was given up, and of those that come after it."""
        seconds = time.monotonic() - self._began_s
        return StuckError(
            f"{self} has not ended for {seconds:.3g} s: the device or its server does not answer, "
            "see `dmesg`; what was complete before is there; go on once the device answers, or "
            "with a folder on another one; where it is only slow, raise nvme.timeout_s",
            path=str(self.path), offset_bytes=self.offset_bytes, nbytes=self.nbytes,
            seconds=seconds,
        )  # fmt: skip

    def __str__(self) -> str:
        where = f" ({format_bytes(self.nbytes)} at byte {self.offset_bytes})" if self.nbytes else ""
        return f"{self.operation} of {self.path}{where}"


class Hand:
    """A thread that makes calls for one caller at a time, in order. It ends with this object, once
    the calls that it was asked for have returned."""

    _asked: SimpleQueue[Call | None] | None = None

    def __init__(self) -> None:
        self._asked = SimpleQueue()
        self._stuck: Call | None = None
        self._last: Call | None = None  # that was asked for
        self._timeout_s = _timeout_s.get()
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=_work, args=(self._asked,), name="offload-checkpoint-call", daemon=True
        )
        start(self._thread)

    def end(self) -> None:
        """Let the thread end behind the calls that it was asked for, and wait for that, a little,
        unless something does not return."""
        if self._asked is None:
            return
        self._asked.put(None)
        self._asked = None  # not before: what a Ctrl-C cuts short, __del__ repeats
        if self._last is not None and not _left:
            self._last.wait_a_little()
            self._leave_unless_returned(self._last)
        if self._stuck is None and not _left:
            self._thread.join(_PATIENCE_S)

    def __del__(self) -> None:
        if self._asked is not None:  # may be called amid any wait: waits for nothing
            self._asked.put(None)

    @property
    def is_here(self) -> bool:
        """False in a forked child, which has not got the thread."""
        return self._pid == os.getpid()

    def make(
        self, operation: str, path: Path, function: Callable[..., R], *args: Any,
        offset_bytes: int = 0, nbytes: int = 0,
    ) -> R:  # fmt: skip
        """The result of `function(*args)`, or its error. StuckError if it does not return in time,
        or an earlier one has not. A Ctrl-C is raised when the call has returned, or soon."""
        result: R = self.result(Call(operation, path, function, args, offset_bytes, nbytes))
        return result

    def ask(self, call: Call) -> None:
        """Have it made behind all others, and do not wait for it."""
        assert self._asked is not None, "it has not ended"
        self._last = call
        self._asked.put(call)
        call.is_asked = True

    def result(self, call: Call) -> Any:
        """Of a call that was asked for, in the order of asking, or is asked for now. Raises as
        `make`."""
        if self._stuck is not None:
            raise self._stuck.stuck()
        try:
            if not call.is_asked:
                self.ask(call)
            call.wait(TIMEOUT_S if self._timeout_s is None else self._timeout_s)
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

    def _hurry(self, call: Call) -> None:
        if call.take_back():
            return
        try:
            call.wait_a_little()
        finally:  # another Ctrl-C may end that
            self._leave_unless_returned(call)

    def _leave_unless_returned(self, call: Call) -> None:
        call.give_up()
        if not call.has_returned:
            self._stuck = call


def _work(asked: SimpleQueue[Call | None]) -> None:
    while True:
        call = asked.get()
        if call is None:
            return
        call.run()
        del call  # with its memory


def start(thread: threading.Thread) -> None:
    """Whole, whenever a Ctrl-C comes. OSError where the system gives this process no more."""
    try:
        with uninterrupted:
            thread.start()
    except RuntimeError:
        raise OSError(
            errno.ENOMEM, "no thread can be started; raise the limit of processes (`ulimit -u`), "
            "of a container's tasks or of memory",
        ) from None  # fmt: skip


def patiently(operation: str, path: Path, function: Callable[..., R], *args: Any) -> R:
    """One call, by a hand of its own. Raises as `Hand.make`."""
    hand = Hand()
    try:
        return hand.make(operation, path, function, *args)
    finally:
        hand.end()


def when_returned(
    function: Callable[[], None], below: Path, operations: Collection[str] | None = None
) -> bool:
    """Call `function` when each of the calls (of some `operations`) that were left at or below a
    path has returned. False, and it is not called, if there are none."""
    with _books:
        found = [
            call for call in _left
            if call.path.is_relative_to(below)
            and (operations is None or call.operation in operations)
        ]  # fmt: skip
        for call in found:
            call.then.append(function)
    return bool(found)
