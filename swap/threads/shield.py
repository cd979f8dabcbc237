"""Delays a Ctrl-C until the runtime's bookkeeping is consistent.

Python raises KeyboardInterrupt at any call of the main thread. Amid bookkeeping it could lose a
slot, finish a request twice, or leave a lock locked. So a signal that comes while the main thread
runs something under `defer_signals` or `interrupted_in_waits` is noted, and raised where the
outermost of them ends:

    user's code ──┤ engine's call ├── user's code
                     ▲ signal      ▲ KeyboardInterrupt

The user's own handler, set aside meanwhile, then handles it. Inside `interrupted_in_waits` a
signal ends the wait for a transfer at once, as an error would. Threads other than the main one
never see a signal and are not concerned.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` without its enums, five times as fast
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from offload.tiers.errors import StateError

P = ParamSpec("P")
R = TypeVar("R")
Handler = Callable[[int, FrameType | None], Any]

# Those that programs make raise: Ctrl-C, the end of a job, a time limit.
_SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGALRM))
PATIENCE_S = 5.0  # after which another signal is not put off


class _Deferral:
    """Signals of this process, while the main thread is not to be interrupted."""

    def __init__(self) -> None:
        self.main = threading.main_thread().ident
        self.torn = False  # what had to be whole was cut short all the same
        self._depth = self._firm = 0
        self._waiting = False
        self._handlers: dict[int, Handler] = {}  # the user's
        self._noted: list[int] = []
        self._first_s = 0.0

    # A signal is raised between any two calls below: until its handler is the shield's nothing has
    # begun, once it is the user's again everything has ended.

    def enter(self, *, firm: bool) -> None:
        if not self._depth:
            try:
                for number in _SIGNALS:
                    handler = _signal.getsignal(number)
                    if callable(handler):  # else it is ignored, or ends the process
                        self._handlers[number] = handler
                        _signal.signal(number, self._note)
            except BaseException:
                self._end()
                raise
        self._depth += 1
        self._firm += firm

    def leave(self, *, firm: bool) -> None:
        self._firm -= firm
        if self._depth > 1:
            self._depth -= 1
        else:
            self._end()

    def _end(self) -> None:
        try:
            self._put_back()
        finally:
            self._depth = 0
            noted, self._noted = self._noted, []
            if noted:
                _raise_again(noted)

    def _put_back(self) -> None:
        try:
            while self._handlers:
                number, handler = self._handlers.popitem()
                _signal.signal(number, handler)
        finally:
            if self._handlers:
                self._put_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal while the main thread must not be interrupted: note it for later."""
        handler = self._handlers.get(number)
        if self._waiting and handler is not None:
            handler(number, frame)
            return
        if not self._noted:
            self._first_s = time.monotonic()
        elif handler is not None and time.monotonic() - self._first_s > PATIENCE_S:
            self._noted.clear()
            try:
                handler(number, frame)
            except BaseException:
                self.torn = True
                raise
            return
        self._noted.append(number)

    def begin_wait(self) -> None:
        """Code up to `end_wait` may be interrupted, if the caller allows it."""
        if self._depth and not self._firm and get_ident() == self.main:
            self._waiting = True
            noted, self._noted = self._noted, []
            for number in noted:
                self._note(number, None)

    def end_wait(self) -> None:
        if self._waiting and get_ident() == self.main:
            self._waiting = False

    def forget_parent(self) -> None:
        """Reset the state in a forked child, whose only thread may not have been the main one."""
        if self.main == get_ident():
            return
        self.main = get_ident()
        self._firm = 0
        self._waiting = False
        self._noted.clear()
        self._end()


def _raise_again(numbers: list[int]) -> None:
    try:
        signal.raise_signal(numbers.pop(0))
    finally:
        if numbers:
            _raise_again(numbers)


_deferral = _Deferral()
os.register_at_fork(after_in_child=_deferral.forget_parent)


class _Whole:
    """A context, also to decorate functions with. Can be entered within itself."""

    def __init__(self, *, firm: bool) -> None:
        self._firm = firm

    def __enter__(self) -> None:
        if get_ident() == _deferral.main:
            _deferral.enter(firm=self._firm)

    def __exit__(self, *_: object) -> None:
        if get_ident() == _deferral.main:
            _deferral.leave(firm=self._firm)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        firm = self._firm

        @functools.wraps(function)
        def whole(*args: P.args, **kwargs: P.kwargs) -> R:
            if get_ident() != _deferral.main:
                return function(*args, **kwargs)
            _deferral.enter(firm=firm)
            try:
                return function(*args, **kwargs)
            finally:
                _deferral.leave(firm=firm)

        return whole


defer_signals = _Whole(firm=True)
interrupted_in_waits = _Whole(firm=False)
begin_wait, end_wait = _deferral.begin_wait, _deferral.end_wait


@contextmanager
def ending_with(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` behind what is inside, again if a Ctrl-C comes just before it has begun. It is to
    defer signals itself, and calling it twice must do no harm."""
    try:
        yield
    finally:
        try:
            end()
        except KeyboardInterrupt:
            end()
            raise


def check_whole() -> None:
    """Raise StateError if something that had to be whole was cut short."""
    if _deferral.torn:
        raise StateError(
            f"a second interrupt, {PATIENCE_S:g} s after the first, cut short what has to be "
            "whole, and what became of it is unknown; go on from a checkpoint in a new process"
        )
