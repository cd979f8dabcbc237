"""An event that happens once, and that a Ctrl-C cannot break.

`threading.Event` waits in Python: a Ctrl-C between two of its lines leaves its lock locked, and who
waits next, or sets it, does so for ever; or it is turned into a RuntimeError. This one waits in C,
which ends a wait or does not.
"""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue

_LOOK_S = 1.0  # a Ctrl-C may take from the others that wait what tells them


class Latch:
    """Closed until it is opened, for good, by any thread and any number of times."""

    def __init__(self) -> None:
        self._is_open = False
        self._told: SimpleQueue[None] = SimpleQueue()

    def open(self) -> None:
        """Release all threads that wait."""
        self._is_open = True
        self._told.put(None)

    @property
    def is_open(self) -> bool:
        return self._is_open

    def wait(self, timeout_s: float) -> bool:
        """Block until it is open, for `timeout_s` at most; returns whether it is open."""
        if not self._is_open:
            with suppress(Empty):
                self._told.get(timeout=timeout_s)
                self._told.put(None)  # for the next one
        return self._is_open

    def wait_for_ever(self) -> None:
        """Block until it is open."""
        while not self.wait(_LOOK_S):
            pass
