"""Calls of the system that stay in the kernel, as far as anybody else can see, until a test lets
them return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from offload.swap.io import hands
from offload.swap.io.timeout_thread import TimeoutThread

HAND = "offload-call"
SOON_S = 10.0  # at most, for what another thread does at once


@contextmanager
def soon(**others: float) -> Iterator[None]:
    """What is stuck inside stays so until a test ends it: there is no need to wait for long."""
    times = {"TIMEOUT_S": 0.05, "_PATIENCE_S": 0.05}
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in {**times, **others}.items():
            patch.setattr(hands, name, seconds)
        yield


def ended(condition: Callable[[], bool]) -> bool:
    """Waits for it."""
    tick = threading.Event()
    return any(condition() or tick.wait(0.005) for _ in range(int(SOON_S / 0.005)))


def all_ended() -> bool:
    """Waits until all calls that were left have returned, and their threads are gone."""
    return ended(
        lambda: not hands._left and all(each.name != HAND for each in threading.enumerate())
    )


def give_up_this_call() -> None:
    """As if nobody waited any longer for the call that this thread makes."""
    thread = threading.current_thread()
    assert isinstance(thread, TimeoutThread)
    thread.give_up()


class Gate:
    """A call that waits here is in the kernel, as far as anybody else can see."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self._function = function

    def __call__(self, *args: Any) -> Any:
        self.entered.set()
        assert self.opened.wait(SOON_S)
        return self._function(*args)
