"""One move in flight. The code that moves the bytes completes it; the code that needs them waits.

    PENDING ──complete(value)/fail(error)──> SETTLED ──callbacks run──> DONE
              in the completing thread                                  waiters wake up

Callbacks run between the two, so that bookkeeping (an extent freed, a slot given back) has
happened by the time any `wait()` returns.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import TracebackType
from typing import Generic, TypeVar, cast

from offload.swap.threads.lanes import Lane
from offload.swap.threads.shield import begin_wait, end_wait
from offload.tiers.errors import StateError, StuckError

T = TypeVar("T")
U = TypeVar("U")

STALL_S = 60.0  # a wait that lasts longer is told of in the log, each time
_log = logging.getLogger(__name__)


class _State(enum.Enum):
    PENDING = "pending"  # the bytes are moving; the mover owns the buffer
    SETTLED = "settled"  # the outcome is known; callbacks run in the completing thread
    DONE = "done"  # the buffer is the caller's again


class Failure:
    """The error of a transfer. Shared by the transfers it spreads to."""

    __slots__ = ("_traceback", "error")

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self._traceback: TracebackType | None = error.__traceback__

    def again(self) -> BaseException:
        """The error, to be raised, with the traceback of the mover each time: raising it again
        must not pile up frames."""
        return self.error.with_traceback(self._traceback)


class Transfer(Generic[T]):
    """One move in flight, of value `T` once done. Thread-safe; any number may wait.

    The code that moves the bytes calls one of `complete`, `fail` and `spread`, exactly once.
    `what` is shown in errors; it is turned into text only when one is raised. Waits for it are
    counted for `lane`.
    """

    __slots__ = (
        "_callbacks", "_completing_thread", "_failure", "_gates", "_lock", "_state", "_value",
        "lane", "what",
    )  # fmt: skip

    def __init__(self, what: object, lane: Lane | None = None) -> None:
        self.what = what
        self.lane = lane
        self._lock = threading.Lock()
        self._state = _State.PENDING
        self._value: T | None = None
        self._failure: Failure | None = None
        self._completing_thread = 0
        self._callbacks: list[Callable[[Transfer[T]], object]] = []
        self._gates: list[threading.Lock] = []  # one held lock per waiter, released when done

    # ---- for the waiting thread

    def done(self) -> bool:
        """True once `wait()` would not block. Never blocks."""
        return self._state is _State.DONE

    def wait(self) -> T:
        """Block until the move has ended, and return its value.

        Raises the error of the move, with its cause, now and at every later wait. Called from a
        callback of this very transfer it returns at once.
        """
        if self._state is not _State.DONE:
            self._await_done()
        failure = self._failure
        if failure is not None:
            raise failure.again()
        return cast(T, self._value)

    @property
    def failure(self) -> Failure | None:
        """The error, or None (yet)."""
        return self._failure

    def then(self, callback: Callable[[Transfer[T]], object]) -> None:
        """Run `callback(self)` once: in the completing thread, or here if that is over.

        It must be short and must not wait for other transfers. What it raises in the
        completing thread becomes the error of a transfer that had none.
        """
        with self._lock:
            if self._state is _State.PENDING:
                self._callbacks.append(callback)
                return
        callback(self)

    # ---- for the code that moves the bytes

    @classmethod
    def completed(cls, value: T, what: object = "a completed transfer") -> Transfer[T]:
        transfer = cls(what)
        transfer._value = value
        transfer._state = _State.DONE
        return transfer

    def complete(self, value: T) -> None:
        """The bytes are there: run the callbacks, then wake all waiters."""
        self._settle(value, None)

    def fail(self, error: BaseException) -> None:
        """The move failed: run the callbacks, then raise `error` in all waiters."""
        self._settle(None, Failure(error))

    def spread(self, failure: Failure) -> None:
        """Fail with a failure that another transfer has already."""
        self._settle(None, failure)

    def _settle(self, value: T | None, failure: Failure | None) -> None:
        with self._lock:
            if self._state is not _State.PENDING:
                raise StateError(f"{self.what} was completed twice")
            self._value, self._failure = value, failure
            self._completing_thread = threading.get_ident()
            self._state = _State.SETTLED
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
                if self._failure is None:
                    self._failure = Failure(error)
                else:
                    self._failure.error.add_note(f"and a callback of it failed: {error!r}")
        with self._lock:
            self._state = _State.DONE
            self._completing_thread = 0
            gates, self._gates = self._gates, []
        for gate in gates:
            gate.release()

    def _await_done(self) -> None:
        gate = threading.Lock()
        gate.acquire()
        with self._lock:
            if self.done() or self._completing_thread == threading.get_ident():
                return
            self._gates.append(gate)
        with nullcontext() if self.lane is None else self.lane.waiting():
            try:
                begin_wait()
                while not gate.acquire(timeout=STALL_S):
                    _log.warning("still waiting for %s; see `dmesg`", self.what)
            finally:
                end_wait()


def all_of(transfers: Iterable[Transfer[T]]) -> Transfer[list[T]]:
    """A transfer of all values, in order. It ends when the last one ends, also after an error,
    so that no buffer is still moving; then the first error in order is raised."""
    sources = list(transfers)
    if not sources:
        return Transfer.completed([], what="nothing")
    lane = next((source.lane for source in sources if source.lane is not None), None)
    result: Transfer[list[T]] = Transfer(f"{len(sources)} transfers, {sources[0].what} ...", lane)
    lock = threading.Lock()
    missing = len(sources)

    def one_ended(_: Transfer[T]) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            if missing:
                return
        failures = [source._failure for source in sources if source._failure is not None]
        if not failures:
            result.complete([cast(T, source._value) for source in sources])
            return
        result.spread(failures[0])

    for source in sources:
        source.then(one_ended)
    return result


def is_stuck(transfer: Transfer[U]) -> bool:
    """Whether it was given up: the memory it moves bytes into may change at any time from now on,
    and must not be used for anything else."""
    return transfer.failure is not None and isinstance(transfer.failure.error, StuckError)
