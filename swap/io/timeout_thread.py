"""Calls on a swap file or its folder that may never return. (Its reads and writes: `io_watch`.)

A disk or a server that does not answer keeps the thread that asks, and the kernel has no way to
take a call back. So a thread of its own makes the call:

    caller            ├─ starts ─┤ waits ....... │ the result or, after `timeout_s`, a StuckError
    timeout thread               ├──────── call ──────── ...

A call that is given up keeps its thread, its memory and its descriptor until it returns, if ever;
`when_returned` puts off until then what must come after it. Time is counted in looks, and none
passes while this process is stopped or a computer sleeps.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from offload.swap.io.io_watch import LOOKS, WARN_AT, warn_slow
from offload.swap.threads.shield import defer_signals
from offload.tiers.errors import StuckError

R = TypeVar("R")

_LOOK_S = 1.0  # at most: a Ctrl-C that comes just before one begins is raised at its end
_PATIENCE_S = 5.0  # how long a Ctrl-C waits for the call under way


class TimeoutThread(threading.Thread, Generic[R]):
    """The thread of one call; `operation`, then `path`, name it in messages. Where no thread can be
    had, the caller's own makes the call."""

    def __init__(
        self, operation: str, path: str | os.PathLike[str], function: Callable[..., R], *args: Any
    ) -> None:
        super().__init__(name="offload-call", daemon=True)
        self.what = f"{operation} {path}"
        self.path = str(path)
        self.has_returned = False
        self._call: tuple[Callable[..., R], tuple[Any, ...]] | None = (function, args)
        self._value: R
        self._error: BaseException | None = None
        self._over: SimpleQueue[None] = SimpleQueue()  # its waits are C's: a Ctrl-C ends them whole
        self._began_s = time.monotonic()
        self._then: list[Callable[[], None]] = []
        self._books = threading.Lock()

    def result(self, timeout_s: float) -> R:
        """Make the call; its result, or its error. StuckError if it does not return in time. A
        Ctrl-C is raised when the call has returned, or soon."""
        try:
            self._begin()
            self._wait(timeout_s)
        except BaseException:
            if self.is_alive():
                self._is_over_within(_PATIENCE_S)
            raise
        if not self.has_returned:
            raise self.stuck()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback leads to the caller's memory
        return self._value

    def _begin(self) -> None:
        if sys.is_finalizing():  # when no other thread comes to run
            self.run()
            return
        try:
            with defer_signals:
                self.start()
        except RuntimeError:  # at a limit on threads, or at exit (of Python 3.12 and newer)
            self.run()

    def run(self) -> None:
        assert self._call is not None, "a thread makes one call"
        function, args = self._call
        try:
            self._value = function(*args)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        self._call = None
        with self._books:
            self.has_returned = True
        self.give_up()
        for then in self._then:
            then()

    def give_up(self) -> None:
        """End the wait for the call."""
        self._over.put(None)

    def _wait(self, timeout_s: float) -> None:
        looks = max(LOOKS, math.ceil(timeout_s / _LOOK_S))
        for look in range(1, looks + 1):
            if self._is_over_within(timeout_s / looks):
                return
            if look == looks * WARN_AT // LOOKS:
                warn_slow(self.what, time.monotonic() - self._began_s, timeout_s)

    def _is_over_within(self, timeout_s: float) -> bool:
        with suppress(Empty):
            self._over.get(timeout=timeout_s)
            return True
        return False

    def when_returned(self, function: Callable[[], None]) -> bool:
        """Call `function` in this thread once the call has returned. Returns False, without calling
        it, if it has already returned."""
        with self._books:
            if not self.has_returned:
                self._then.append(function)
            return not self.has_returned

    def stuck(self) -> StuckError:
        """The error of a call that was given up, and of those that come after it."""
        seconds = time.monotonic() - self._began_s
        return StuckError(
            f"{self.what} has not ended for {seconds:.3g} s: the device or its server does not "
            "answer, see `dmesg`; go on from the last checkpoint with a new engine, once the "
            "device answers or with another folder in nvme.paths; where it is only slow, raise "
            "nvme.timeout_s",
            path=self.path, seconds=seconds,
        )  # fmt: skip
