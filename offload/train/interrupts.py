"""Ctrl-C that cannot get lost.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a finaliser or a callback
from C it is printed or dropped, and the run would go on in spite of the Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Remembers that one came."""

    def __init__(self) -> None:
        self.seen = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.seen = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise the KeyboardInterrupt that was lost, if one was."""
        if self.seen:
            raise KeyboardInterrupt


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
