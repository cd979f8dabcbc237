"""The disk's limit: a raw O_DIRECT loop without queue, checksum or books: threads in `preadv` and
`pwritev`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from offload.swap.io.swap_file import SwapFile
from offload.tiers.errors import StorageError

_MIB = 1 << 20


@dataclass(frozen=True)
class Shape:
    """The number of calls in flight, and the bytes of each."""

    depth: int
    block_nbytes: int

    def __str__(self) -> str:
        return f"threads, {self.depth} x {self.block_nbytes / _MIB:g} MiB"


RAW = Shape(8, 16 * _MIB)  # as much under way as any disk here needs


class ThreadsLoop:
    """Moves the whole blocks of the first `nbytes` of a file, once, in either direction: `depth`
    threads, each with one buffer, take the next block when they are done."""

    def __init__(self, shape: Shape, file: SwapFile, buffer: memoryview, nbytes: int) -> None:
        self.name = str(shape)
        self._file, self._block = file, shape.block_nbytes
        self.nbytes = nbytes // self._block * self._block
        self._buffers = cut(buffer, shape.depth, shape.block_nbytes)
        self._pool = ThreadPoolExecutor(shape.depth, thread_name_prefix="offload-bench-io")

    def run(self, *, write: bool) -> None:
        self.mixed(*((0, self.nbytes) if write else (self.nbytes, 0)))

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


def cut(buffer: memoryview, count: int, nbytes: int) -> list[memoryview]:
    """The first `count` parts of `nbytes` each. ValueError if the buffer is shorter: a slice past
    its end would be, too, and a loop would move less than its row says."""
    if buffer.nbytes < count * nbytes:
        raise ValueError(
            f"{count} blocks of {nbytes} bytes do not fit in the buffer's {buffer.nbytes}"
        )
    return [buffer[i * nbytes : (i + 1) * nbytes] for i in range(count)]
