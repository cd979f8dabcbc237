"""Calls of the system of which one goes wrong, for whatever makes them through
`checkpoint.format.disk`; which one and how is said before."""

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offload.checkpoint.format import disk

# What can happen to every call, to calls that need room, and to those that move bytes.
ANY = ("EIO", "slow")
ROOM = ("ENOSPC", "EDQUOT")
NEED_ROOM = {
    "mkdir", "create", "pwrite", "fsync", "rename", "exchange", "fsync folder",
}  # fmt: skip
MOVING = {
    "pwrite": ("short", "nothing", "flip", "torn"), "preadv": ("short", "end", "flip", "torn"),
}  # fmt: skip
UNSEEN = ("flip", "torn")  # a write's fault that only the next load finds

Made = Callable[..., Any]


def kinds_of(operation: str) -> tuple[str, ...]:
    room = ROOM if operation in NEED_ROOM else ()
    return (*ANY, *room, *MOVING.get(operation, ()))


class FaultyCalls:
    """A context manager, inside of which calls pass here. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operation = self._kind = ""
        self._left = -1
        self._always = False
        self.seen: Counter[str] = Counter()  # calls, by operation
        self.hits = 0
        self.hit = ""

    def arm(self, operation: str, number: int, kind: str, *, always: bool = False) -> None:
        """The `number`th call of that operation from now on goes wrong; `always`: and all behind
        it."""
        with self._lock:
            self._operation, self._left, self._kind = operation, number, kind
            self._always, self.hits, self.hit = always, 0, ""
            self.seen.clear()

    def release(self) -> None:
        with self._lock:
            self._left = -1

    @contextmanager
    def installed(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disk, "perform", self._made)
            try:
                yield
            finally:
                self.release()

    def _made(self, operation: str, path: Path, function: Made, *args: Any) -> Any:
        kind = self._fault(operation, path)
        if not kind:
            return function(*args)
        number = getattr(errno, kind, None)
        if number is not None:
            if operation == "close":  # it is closed all the same
                function(*args)
            raise OSError(number, os.strerror(number))
        if kind == "slow":
            time.sleep(0.002)
            return function(*args)
        return (_wrong_write if operation == "pwrite" else _wrong_read)(kind, function, *args)

    def _fault(self, operation: str, path: Path) -> str:
        with self._lock:
            self.seen[operation] += 1
            if self._left < 0 or operation != self._operation:
                return ""
            if self._left:
                self._left -= 1
                return ""
            self._left = 0 if self._always else -1
            self.hits += 1
            self.hit = f"{self._kind} of {operation} of {path}"
            return self._kind


def _wrong_write(kind: str, pwrite: Made, fd: int, data: memoryview, offset: int) -> int:
    if kind == "nothing":
        return 0
    if kind == "short":
        return int(pwrite(fd, data[: len(data) // 2 or 1], offset))
    other = bytearray(data)
    _damage(memoryview(other), kind)
    return int(pwrite(fd, other, offset))


def _wrong_read(kind: str, preadv: Made, fd: int, buffers: list[memoryview], offset: int) -> int:
    (buffer,) = buffers
    if kind == "end":
        return 0
    if kind == "short":
        return int(preadv(fd, [buffer[: len(buffer) // 2 or 1]], offset))
    count = int(preadv(fd, buffers, offset))
    _damage(buffer[:count], kind)
    return count


def _damage(data: memoryview, kind: str) -> None:
    if kind == "flip":
        data[len(data) // 3] ^= 16
    else:  # the second half has not arrived
        half = len(data) // 2
        data[half:] = bytes(len(data) - half)
