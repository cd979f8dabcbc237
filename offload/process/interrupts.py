"""Ctrl-C and SIGTERM that cannot get lost, and that end a step before they end the run.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a finaliser or a callback
from C it is printed or dropped, and the run would go on in spite of the Ctrl-C. Amid a step a part
of the weights may have been updated, so that nothing could be saved. SIGTERM, with which batch
systems and preempted machines announce the end, would end the process at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_AGAIN_S = 1.0  # torchrun passes on to its workers a signal that they have got already


class Terminated(KeyboardInterrupt):
    """Raised for a SIGTERM."""


class Interrupts:
    """Remembers that a signal arrived."""

    def __init__(self) -> None:
        self.seen = False
        self.told = False  # a loop that was to end knows of it
        self._pid = os.getpid()
        self._number = int(signal.SIGINT)
        self._seen_at = 0.0
        self._putting_off: str | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Note a signal, as its handler."""
        if os.getpid() != self._pid:  # a forked child has no loop that reads `seen`
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        now = time.monotonic()
        first, self.seen = not self.seen, True
        if first:
            self._number, self._seen_at = number, now
        if self._putting_off is None or (not first and now - self._seen_at >= _AGAIN_S):
            raise self.error()
        if first and self._putting_off:  # `print` may be what was interrupted
            name = "SIGTERM" if number == signal.SIGTERM else "Ctrl-C"
            with suppress(OSError):  # the reader of stderr may be gone
                os.write(2, f"\r{name}: {self._putting_off}\n".encode())

    def error(self) -> KeyboardInterrupt:
        """Return the exception for the first signal."""
        return Terminated() if self._number == signal.SIGTERM else KeyboardInterrupt()

    def check(self) -> None:
        """Raise for a signal that was noted, unless that is put off."""
        if self.seen and self._putting_off is None:
            raise self.error()

    @property
    def is_here(self) -> bool:
        """Whether it belongs to this process, and not to the one that forked it."""
        return self._pid == os.getpid()

    @contextmanager
    def put_off(self, message: str) -> Iterator[None]:
        """Inside, the first signal is noted and `message` written; a later one raises."""
        before, self._putting_off = self._putting_off, message
        try:
            yield
        finally:
            self._putting_off = before


def _noting(number: int) -> Interrupts | None:
    """Return the object that notes this signal now; None if there is none."""
    noting = getattr(signal.getsignal(number), "__self__", None)
    return noting if isinstance(noting, Interrupts) else None


@contextmanager
def noted_interrupts() -> Iterator[Interrupts]:
    """Ctrl-C and SIGTERM are noted inside the block; a block inside another one shares its notes.
    Does nothing off the main thread, nor with a signal that the program handles itself."""
    outer = [noting for number in _DEFAULTS if (noting := _noting(number)) and noting.is_here]
    interrupts = outer[0] if outer else Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    with ExitStack() as stack:
        for number, own in _DEFAULTS.items():
            handler, noting = signal.getsignal(number), _noting(number)
            if handler is own or (noting is not None and not noting.is_here):
                stack.callback(signal.signal, number, handler)
                signal.signal(number, interrupts.note)
        previous_hook = sys.unraisablehook

        def say_unless_interrupt(dropped: sys.UnraisableHookArgs) -> None:
            # those are raised by `check`
            if dropped.exc_type is None or not issubclass(dropped.exc_type, KeyboardInterrupt):
                previous_hook(dropped)

        sys.unraisablehook = say_unless_interrupt
        stack.callback(setattr, sys, "unraisablehook", previous_hook)
        yield interrupts
