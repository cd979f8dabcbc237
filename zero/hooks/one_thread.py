"""Only one thread at a time may call a model: the engine follows the calls of one thread.

A second thread gets an error that names both, because waiting could last for ever. Autograd's own
threads, which work for the thread that waits in `backward()`, are allowed.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import getpid
from threading import get_ident

from offload.tiers.errors import StateError
from offload.zero.hooks.handles import in_backward


class OneThread:
    """A context that one thread enters, as often as it likes; none, while the model is asleep.
    Thread-safe."""

    # While the model is asleep: raises StateError, or wakes it.
    on_use: Callable[[], None] | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0  # the thread's number; 0: none
        self._depth = 0
        self._process = getpid()

    def check_awake(self) -> None:
        """Raise StateError while the model is asleep, or wake it. Values must not be read then,
        but by the thread that puts it to sleep or wakes it: no other one is inside."""
        on_use = self.on_use
        if on_use is not None and not (self._depth and self._inside == get_ident()):
            on_use()

    def __enter__(self) -> None:
        self.check_awake()
        self._enter()

    @contextmanager
    def even_asleep(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self.__exit__()

    def _enter(self) -> None:
        this = get_ident()
        with self._lock:
            if self._process != getpid() or (self._depth and self._inside != this):
                self.check()
            if not self._depth:
                self._inside = this
            self._depth += 1

    def check(self) -> None:
        """Raise StateError if entering would."""
        self.check_process()
        this, other = get_ident(), self._inside
        if self._depth and other != this and not (_is_autograds(this) or _is_autograds(other)):
            raise StateError(
                f"thread {_name(this)} uses a model or its optimizer while thread "
                f"{_name(other)} is in a call of the same one: its tiers follow the calls of one "
                "thread; let threads take turns (a threading.Lock around forward, backward and "
                "step, or generate), or give each a model of its own"
            )

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1

    def check_process(self) -> None:
        """Raise StateError in a forked child: the engine's threads have stayed with its parent."""
        if self._process != getpid():
            raise StateError(
                f"this engine belongs to process {self._process}; its threads are not in this one, "
                f"{getpid()}, which was forked from it: use the model and the engine in the "
                "parent alone (what a DataLoader's workers run must not touch them), or make an "
                "engine after the fork"
            )


def _is_autograds(thread: int) -> bool:
    known = threading._active.get(thread)  # type: ignore[attr-defined]
    python = known is not None and not isinstance(known, threading._DummyThread)
    return not python and (thread != get_ident() or in_backward())


def _name(thread: int) -> str:
    known = threading._active.get(thread)  # type: ignore[attr-defined]
    return f"{thread:#x}" if known is None else repr(known.name)
