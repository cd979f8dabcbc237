"""Signals wait for what must be whole, are raised where it ends, and end a wait at once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offload.swap.io.requests_and_retries import Operation
from offload.swap.io.threads_backend import ThreadsBackend
from offload.swap.threads import shield
from offload.swap.threads.shield import check_whole, defer_signals, interrupted_in_waits
from offload.swap.threads.transfer import Transfer
from offload.tiers.errors import StateError


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert shield._deferral._depth == 0


@pytest.mark.parametrize("kind", [defer_signals, interrupted_in_waits])
def test_an_interrupt_is_raised_where_the_outermost_ends(kind: Any) -> None:
    seen = []

    @kind
    def inner() -> None:
        ctrl_c()
        seen.append("inner")

    @kind
    def outer() -> None:
        inner()
        seen.append("outer")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert seen == ["inner", "outer"]


def interrupt_soon() -> None:
    threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def interrupted_before(transfer: Transfer[Any]) -> None:
    ctrl_c()
    transfer.wait()


def test_a_wait_ends_at_once_where_it_may() -> None:
    never: Transfer[None] = Transfer("what never comes")
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt), interrupted_in_waits:
        never.wait()
    with pytest.raises(KeyboardInterrupt):
        interrupted_in_waits(interrupted_before)(never)
    never.complete(None)


def test_a_wait_within_what_is_uninterrupted_is_waited_for() -> None:
    coming: Transfer[int] = Transfer("what comes")
    threading.Timer(0.1, lambda: coming.complete(1)).start()
    with pytest.raises(KeyboardInterrupt), defer_signals:
        interrupted_in_waits(interrupted_before)(coming)
    assert coming.done()


def test_a_repeated_signal_interrupts_and_nothing_is_trusted_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shield._deferral, "torn", False)
    monkeypatch.setattr(shield, "PATIENCE_S", 0.0)
    check_whole()
    never: Transfer[None] = Transfer("what never comes")
    interrupt_soon()
    # two signals at one moment are one: then this is the second
    again = threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    again.start()
    with pytest.raises(KeyboardInterrupt):
        defer_signals(interrupted_before)(never)
    again.cancel()
    with pytest.raises(StateError, match="checkpoint in a new process"):
        check_whole()


def test_another_thread_is_not_concerned() -> None:
    inside, leave = threading.Event(), threading.Event()

    @defer_signals
    def work() -> None:
        inside.set()
        leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
    leave.set()
    thread.join()


def test_a_child_forked_by_another_thread_can_be_interrupted() -> None:
    ended: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            try:
                ctrl_c()
            except KeyboardInterrupt:
                os._exit(7)
            os._exit(1)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with defer_signals:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert ended == [7]


class Interrupting(ThreadsBackend):
    """Is interrupted when a request has been queued."""

    def _start(self, request: Any) -> None:
        super()._start(request)
        raise KeyboardInterrupt


def test_a_request_that_fails_when_it_is_queued_already_ends_once() -> None:
    read, write = os.pipe()
    os.close(read)
    gate = threading.Event()
    backend = Interrupting(workers=1)
    before: Callable[[], Any] = gate.wait  # it is in a worker's hands when it fails
    moved = backend.submit(
        Operation.WRITE, write, memoryview(bytearray(8)), 0, path="a pipe", before=before
    )
    with pytest.raises(Exception, match="KeyboardInterrupt"):
        moved.wait()
    gate.set()
    backend.close()
    os.close(write)
