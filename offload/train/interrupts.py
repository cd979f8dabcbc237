"""Ctrl-C that cannot get lost, and that ends a step before it ends the run.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a finaliser or a callback
from C it is printed or dropped, and the run would go on in spite of the Ctrl-C. Amid a step a part
of the weights may have been updated, so that nothing could be saved.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_S = 1.0  # torchrun passes on to its workers a Ctrl-C that they have got already


class Interrupts:
    """Remembers that one came."""

    def __init__(self) -> None:
        self.seen = False
        self._seen_at = 0.0
        self._putting_off: str | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        now = time.monotonic()
        if self._putting_off is None or (self.seen and now - self._seen_at >= _AGAIN_S):
            self.seen = True
            raise KeyboardInterrupt
        if not self.seen:
            self.seen, self._seen_at = True, now
            if self._putting_off:  # `print` may be what was interrupted
                os.write(2, f"\r{self._putting_off}\n".encode())

    def check(self) -> None:
        """Raise the KeyboardInterrupt that was lost, if one was."""
        if self.seen:
            raise KeyboardInterrupt

    @contextmanager
    def put_off(self, message: str) -> Iterator[None]:
        """Inside, the first one is noted, and `message` written; another one, later, raises."""
        self._putting_off = message
        try:
            yield
        finally:
            self._putting_off = None


@contextmanager
def noted_interrupts() -> Iterator[Interrupts]:
    """Ctrl-C is noted inside the block. Does nothing off the main thread, or where Ctrl-C is not
    Python's own to handle."""
    interrupts = Interrupts()
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not own or threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    previous_hook = sys.unraisablehook

    def say_unless_interrupt(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_type is not KeyboardInterrupt:  # that one is raised by `check`
            previous_hook(dropped)

    signal.signal(signal.SIGINT, interrupts.note)
    sys.unraisablehook = say_unless_interrupt
    try:
        yield interrupts
    finally:
        sys.unraisablehook = previous_hook
        signal.signal(signal.SIGINT, signal.default_int_handler)
