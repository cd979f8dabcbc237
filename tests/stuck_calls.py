"""Calls of the system that stay in the kernel, as far as anybody else can see, until a test lets
them return."""

from __future__ import annotations

import threading

from offload.swap.io.timeout_thread import TimeoutThread

TIMEOUT_THREAD = "offload-call"
_SOON_S = 10.0  # at most, for what another thread does at once


def all_ended() -> bool:
    """Waits until all calls that were given up have returned, and their threads are gone."""
    tick = threading.Event()
    return any(
        all(each.name != TIMEOUT_THREAD for each in threading.enumerate()) or tick.wait(0.005)
        for _ in range(int(_SOON_S / 0.005))
    )


def give_up_this_call() -> None:
    """Act as the waiter that gives up the call that this thread makes."""
    thread = threading.current_thread()
    assert isinstance(thread, TimeoutThread)
    thread.give_up()
