"""What is rarely asked of a folder for swap files (making one, reserving, closing), and may never
be answered: each by a thread of its own, which can be left behind.

    caller   ├─ asks ─┤ waits .......... │ the result or, after `timeout_s`, a StuckError
    thread            ├───────── call ───────────── ...  │ what was to be done when it returns

The kernel has no way to take a call back; `io_watch` does the same for reads and writes. Time is
counted in looks, and none passes while this process is stopped or a computer sleeps.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from offload.swap.io_watch import LOOKS, WARN_AT
from offload.tiers.errors import StuckError

R = TypeVar("R")

_log = logging.getLogger(__name__)
_PATIENCE_S = 5.0  # of a Ctrl-C, with the call that is under way


class RareCall(threading.Thread, Generic[R]):
    """One call, `what` of `path`, for messages. It is made by `result`."""

    def __init__(
        self, what: str, path: str | os.PathLike[str], function: Callable[..., R], *args: Any
    ) -> None:  # fmt: skip
        super().__init__(name="offload-file-call", daemon=True)
        self.what = f"{what} {os.fspath(path)}"
        self._where = str(path)
        self._function = partial(function, *args)
        self._value: R
        self._error: BaseException | None = None
        self._then: list[Callable[[], None]] = []
        self._began_s = time.monotonic()
        self._books = threading.Lock()
        self._returned = False
        # not `join`: one that a Ctrl-C has ended takes the thread for dead (3.11)
        self._over = threading.Event()  # it has returned, or is not waited for any more

    def run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        with self._books:
            self._returned = True
        self._over.set()
        for function in self._then:
            function()

    def result(self, timeout_s: float) -> R:
        """Make it, and wait: what it returns, or its error. StuckError if it has not returned for
        `timeout_s`. A Ctrl-C is raised when it has returned, or soon."""
        try:
            self._make()
            self._wait(timeout_s)
        except BaseException:
            self._over.wait(_PATIENCE_S)
            raise
        if not self.has_returned:
            raise self.stuck()
        if self.is_alive():
            self.join(_PATIENCE_S)
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback leads to this call
        return self._value

    def _make(self) -> None:
        if sys.is_finalizing():  # no thread comes to run any more
            self.run()
            return
        try:
            self.start()
        except RuntimeError:  # none can be started, as where a limit is reached
            self.run()

    def _wait(self, timeout_s: float) -> None:
        for look in range(LOOKS):
            if self._over.wait(timeout_s / LOOKS):
                return
            if look + 1 == WARN_AT:
                _log.warning(
                    "%s: not ended for %.3g s; see `dmesg`; an error after %.3g s (nvme.timeout_s)",
                    self.what, time.monotonic() - self._began_s, timeout_s,
                )  # fmt: skip

    def give_up(self) -> None:
        """Let nobody wait for it any longer."""
        self._over.set()

    def when_returned(self, function: Callable[[], None]) -> bool:
        """Call `function` once it has returned, in its thread. False, and it is not called, if it
        has already."""
        with self._books:
            if not self._returned:
                self._then.append(function)
            return not self._returned

    @property
    def has_returned(self) -> bool:
        with self._books:
            return self._returned

    def stuck(self) -> StuckError:
        """The error of a call that was left, and of what would come after it."""
        seconds = time.monotonic() - self._began_s
        return StuckError(
            f"{self.what} has not ended for {seconds:.3g} s: the device or its server does not "
            "answer, see `dmesg`; go on from the last checkpoint with a new engine, once the "
            "device answers or with another folder in nvme.paths; where it is only slow, raise "
            "nvme.timeout_s",
            path=self._where, seconds=seconds,
        )  # fmt: skip
