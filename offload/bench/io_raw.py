"""The disk's limit: raw O_DIRECT loops, of which the best for each direction counts.

No queue, no checksum, no books: threads in `preadv` and `pwritev`, or the kernel's asynchronous
interface, at several depths and sizes. What is best differs from device to device, so a small grid
is tried first.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from offload.bench.rounds import Say, seconds_of
from offload.swap.io.libaio_backend import import_libaio
from offload.swap.io.swap_file import SwapFile
from offload.tiers.errors import StorageError, UnsupportedError

_MIB = 1 << 20
_TRIES = 2  # of each configuration; the better one counts


class Loop(Protocol):
    """Moves the first `nbytes` of a file, once, in either direction."""

    name: str

    def run(self, *, write: bool) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Shape:
    """The number of calls in flight, and the bytes of each."""

    kind: str  # threads or libaio
    depth: int
    block_nbytes: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.depth} x {self.block_nbytes / _MIB:g} MiB"


GRID = tuple(
    Shape(kind, depth, mib * _MIB)
    for kind, depth, mib in (
        ("threads", 2, 16), ("threads", 4, 8), ("threads", 4, 16), ("threads", 6, 8),
        ("threads", 8, 4), ("threads", 8, 16), ("libaio", 4, 8), ("libaio", 8, 8),
        ("libaio", 8, 16),
    )
)  # fmt: skip


class ThreadsLoop:
    """`depth` threads, each with one buffer; they take the next block when they are done."""

    def __init__(self, shape: Shape, file: SwapFile, buffer: memoryview, nbytes: int) -> None:
        self.name = str(shape)
        self._file, self._nbytes, self._block = file, nbytes, shape.block_nbytes
        self._buffers = cut(buffer, shape.depth, shape.block_nbytes)
        self._pool = ThreadPoolExecutor(shape.depth, thread_name_prefix="offload-bench-io")

    def run(self, *, write: bool) -> None:
        self.mixed(*((0, self._nbytes) if write else (self._nbytes, 0)))

    def mixed(self, read_nbytes: int, write_nbytes: int) -> None:
        """Read the first `read_nbytes` while writing the first `write_nbytes`, evenly mixed.

        Where that fails or is interrupted, no thread begins another block.
        """
        todo = iter(_mix(read_nbytes // self._block, write_nbytes // self._block))
        lock = threading.Lock()

        def work(part: memoryview) -> None:
            while True:
                with lock:
                    turn = next(todo, None)
                if turn is None:
                    return
                index, write = turn
                move_all(self._file.fd, part, index * self._block, write=write)

        try:
            for done in [self._pool.submit(work, part) for part in self._buffers]:
                done.result()
        finally:
            todo = iter(())

    def close(self) -> None:
        self._pool.shutdown()


def _mix(reads: int, writes: int) -> Iterator[tuple[int, bool]]:
    """Block numbers, and whether each is written, the rarer kind spread among the other."""
    turns = [((i + 0.5) / reads, i, False) for i in range(reads)]
    turns += [((i + 0.5) / writes, i, True) for i in range(writes)]
    return ((index, write) for _, index, write in sorted(turns))


def move_all(fd: int, part: memoryview, offset_bytes: int, *, write: bool) -> None:
    """Move one whole block; OSError of the call, StorageError at the end of the file."""
    done = 0
    while done < part.nbytes:
        call = os.pwritev if write else os.preadv
        count = call(fd, [part[done:]], offset_bytes + done)
        if count == 0:
            raise StorageError(
                f"a raw loop met the end of its file at {offset_bytes + done} bytes",
                offset_bytes=offset_bytes + done, nbytes=part.nbytes - done,
            )  # fmt: skip
        done += count


class LibaioLoop:
    """`depth` requests in the kernel; each that comes back is sent out for the next block."""

    def __init__(self, shape: Shape, file: SwapFile, buffer: memoryview, nbytes: int) -> None:
        """Raises UnsupportedError if libaio cannot be used."""
        self.name = str(shape)
        self._file, self._nbytes = file, nbytes
        self._block, self._depth = shape.block_nbytes, shape.depth
        self._buffers = cut(buffer, shape.depth, shape.block_nbytes)
        self._libaio: Any = import_libaio()
        try:
            self._context: Any = self._libaio.AIOContext(shape.depth)
        except OSError as error:
            raise UnsupportedError(
                f"libaio cannot have {shape.depth} kernel requests; raise /proc/sys/fs/aio-max-nr"
            ) from error

    def run(self, *, write: bool) -> None:
        lib = self._libaio
        mode = lib.AIOBLOCK_MODE_WRITE if write else lib.AIOBLOCK_MODE_READ
        offsets = iter(range(0, self._nbytes, self._block))
        flying: dict[Any, memoryview] = {}
        for part, offset in zip(
            self._buffers, itertools.islice(offsets, self._depth), strict=False
        ):
            self._send(mode, part, offset, flying)
        while flying:
            for block, result, _ in self._landed():
                part = flying.pop(block)
                if result != part.nbytes:
                    raise StorageError(
                        f"{self.name}: the kernel moved {result} of {part.nbytes} bytes",
                        nbytes=part.nbytes,
                    )
                following = next(offsets, None)
                if following is not None:
                    self._send(mode, part, following, flying)

    def _send(
        self, mode: Any, part: memoryview, offset: int, flying: dict[Any, memoryview]
    ) -> None:
        block = self._libaio.AIOBlock(mode, self._file.fd, [part], offset)
        flying[block] = part
        self._context.submit([block])

    def _landed(self) -> Any:
        while True:
            try:
                return self._context.getEvents(1, self._depth)
            except OSError as error:
                if abs(error.errno or 0) != errno.EINTR:
                    raise

    def close(self) -> None:
        self._context.close()


def cut(buffer: memoryview, count: int, nbytes: int) -> list[memoryview]:
    """The first `count` parts of `nbytes` each. ValueError if the buffer is shorter: a slice past
    its end would be, too, and a loop would move less than its row says."""
    if buffer.nbytes < count * nbytes:
        raise ValueError(
            f"{count} blocks of {nbytes} bytes do not fit in the buffer's {buffer.nbytes}"
        )
    return [buffer[i * nbytes : (i + 1) * nbytes] for i in range(count)]


def open_loop(shape: Shape, file: SwapFile, buffer: memoryview, nbytes: int) -> Loop:
    """The loop of `shape` over whole blocks of the first `nbytes` of `file`."""
    whole = nbytes // shape.block_nbytes * shape.block_nbytes
    if shape.kind == "libaio":
        return LibaioLoop(shape, file, buffer, whole)
    return ThreadsLoop(shape, file, buffer, whole)


@dataclass(frozen=True)
class Tried:
    """Bandwidth of one shape on the grid."""

    shape: Shape
    read_bytes_per_s: float
    write_bytes_per_s: float


def try_grid(
    file: SwapFile, buffer: memoryview, nbytes: int, say: Say, grid: Sequence[Shape] = GRID
) -> list[Tried]:
    """Each shape that works here and fits, the better of two passes per direction."""
    tried = []
    for shape in grid:
        if shape.block_nbytes * shape.depth > min(buffer.nbytes, nbytes):
            continue
        say(f"trying the disk with {shape}")
        try:
            loop = open_loop(shape, file, buffer, nbytes)
        except UnsupportedError:
            continue
        whole = nbytes // shape.block_nbytes * shape.block_nbytes
        try:
            write_s = min(seconds_of(partial(loop.run, write=True)) for _ in range(_TRIES))
            read_s = min(seconds_of(partial(loop.run, write=False)) for _ in range(_TRIES))
        finally:
            loop.close()
        tried.append(Tried(shape, whole / read_s, whole / write_s))
    return tried
