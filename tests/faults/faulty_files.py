"""Swap files of which one call goes wrong, in this process; which one and how is said before."""

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from offload.memory import tier_manager
from offload.swap.io.backends import open_backend
from offload.swap.io.io_backend import IOBackend
from offload.swap.io.io_watch import LOOKS
from offload.swap.io.requests_and_retries import Operation
from offload.swap.io.threads_backend import ThreadsBackend
from tests.aio import refuse_o_direct

_NEVER_S = 1e6  # the watch's timeout: faults alone say that a call takes too long
_RELEASE_S = 60.0

Call = Callable[[int, Any, int], int]

# Faults without an effect: the call is tried again, or goes on from where it stopped.
MENDED = ("EINTR", "EAGAIN", "short", "ragged", "slow")
# Faults that raise an error, unless those bytes are never read.
FATAL = ("EIO", "ENOSPC", "end of file", "flip", "torn", "stuck")
KINDS = MENDED + FATAL


class FaultyFiles:
    """Makes the backends of engines. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = -1  # calls until the one that goes wrong
        self._kind = ""
        self._always = False
        self._ill: set[tuple[bool, int]] = set()  # extents whose calls all fail
        self._released = threading.Event()
        self._inside = 0
        self._out = threading.Condition(self._lock)
        self.calls = 0
        self.hit = ""  # the fault that happened, and to what

    def arm(self, call: int, kind: str, *, always: bool = False) -> None:
        """The `call`th from now on goes wrong, or the next one to which that can happen; `always`:
        and all of those behind it."""
        with self._lock:
            self._left, self._kind, self._always = call, kind, always

    def release(self) -> None:
        """Let stuck calls return now, and wait for them."""
        self._released.set()
        with self._lock:
            assert self._out.wait_for(lambda: not self._inside, _RELEASE_S)

    @contextmanager
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Engines that are made meanwhile have such files: buffered, for with O_DIRECT half a piece
        would be refused as no whole number of blocks."""
        with monkeypatch.context() as patched:
            refuse_o_direct(patched)
            patched.setattr(tier_manager, "open_backend", self._open)
            yield

    def _open(self, name: str, **options: Any) -> IOBackend:
        def on(real: Call, *, reads: bool) -> Call:
            def call(fd: int, buffers: Any, offset: int) -> int:
                kind = self._fault(offset, reads=reads)
                if not kind:
                    return real(fd, buffers, offset)
                return self._go_wrong(backend, kind, real, fd, buffers[0], offset, reads=reads)

            return call

        backend: Any = open_backend(name, **{**options, "timeout_s": _NEVER_S})
        backend._calls = {
            operation: on(call, reads=operation is Operation.READ)
            for operation, call in backend._calls.items()
        }
        return backend  # type: ignore[no-any-return]

    def _fault(self, offset: int, *, reads: bool) -> str:
        """The fault of this call, if it has one."""
        with self._lock:
            self.calls += 1
            if (reads, offset) in self._ill:
                return "EIO"
            if self._left < 0:
                return ""
            if self._left or not _can_happen(self._kind, reads=reads):
                self._left -= self._left > 0
                return ""
            self._left = 0 if self._always else -1
            self.hit = f"{self._kind} of a {'read' if reads else 'write'} at {offset}"
            if self._kind == "EIO":  # of this place, from now on
                self._ill.add((reads, offset))
            return self._kind

    def _go_wrong(
        self, backend: ThreadsBackend, kind: str, real: Call, fd: int, buffer: memoryview,
        offset: int, *, reads: bool,
    ) -> int:  # fmt: skip
        number = getattr(errno, kind.split()[0], None)
        if number is not None:
            raise OSError(number, os.strerror(number))
        if kind == "end of file":
            return 0
        if kind == "stuck":
            self.hold(backend)
        if kind == "slow":
            for _ in range(LOOKS - 2):
                backend.watch.look()
        if kind in ("short", "ragged"):
            part = buffer.nbytes // 2 + (17 if kind == "ragged" else 0)
            return real(fd, [buffer[:part]], offset)
        if reads or kind not in ("flip", "torn"):
            return real(fd, [buffer], offset)
        return real(fd, [_damaged(buffer, kind)], offset)

    def hold(self, backend: ThreadsBackend) -> None:
        """Not one call of this path ends, for as long as it takes until it is given up."""
        with self._lock:
            self._inside += 1
        try:
            while not self._released.wait(0.001):
                backend.watch.look()
        finally:
            with self._lock:
                self._inside -= 1
                self._out.notify_all()


def _can_happen(kind: str, *, reads: bool) -> bool:
    if kind == "end of file":
        return reads
    if kind in ("ENOSPC", "torn", "flip"):
        return not reads
    return True


def _damaged(buffer: memoryview, kind: str) -> memoryview:
    """The bytes that reach the device instead, in memory that suits O_DIRECT as well."""
    other = memoryview(mmap.mmap(-1, buffer.nbytes))
    other[:] = buffer
    if kind == "flip":
        other[buffer.nbytes // 3] ^= 16
    else:  # what was there before it, in the second half
        half = buffer.nbytes // 2
        other[half:] = bytes(buffer.nbytes - half)
    return other
