"""The disk's limit: a raw O_DIRECT loop without queue, checksum or books: threads in `preadv` and
`pwritev`, over a file that was written in full before, as the first write to fresh blocks is slow.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from offload.bench.record import Say, seconds_of
from offload.swap.io.swap_file import SwapFile
from offload.tiers.anonymous_memory import AnonymousMemory
from offload.tiers.errors import StorageError
from offload.tiers.units import format_bytes

_MIB = 1 << 20
_DEPTH, _BLOCK_NBYTES = 8, 16 * _MIB  # calls in flight, as many as any disk here needs


def raw_loop(
    folder: Path, nbytes: int, say: Say, opened: ExitStack, block_nbytes: int = _BLOCK_NBYTES
) -> ThreadsLoop:
    """Return a loop over a new file of `nbytes` in `folder`, both closed with `opened`. Blocks
    until the file is written."""
    file = opened.enter_context(SwapFile(folder))
    file.reserve(nbytes)
    blocks = noise(min(_DEPTH, nbytes // block_nbytes), block_nbytes)
    fill(file, blocks[0], nbytes, say)
    loop = ThreadsLoop(file, blocks, nbytes)
    opened.callback(loop.close)
    return loop


def noise(count: int, nbytes: int) -> list[memoryview]:
    """Blocks of page-aligned memory full of bytes that no device compresses.

    It is what the tiers have: with small pages, or shared ones, some disks are a third as fast.
    """
    buffer = memoryview(AnonymousMemory(count * nbytes))
    for start in range(0, buffer.nbytes, _MIB):
        part = buffer[start : start + _MIB]
        part[:] = os.urandom(part.nbytes)
    return [buffer[i * nbytes : (i + 1) * nbytes] for i in range(count)]


def fill(file: SwapFile, block: memoryview, nbytes: int, say: Say) -> None:
    """Write `nbytes` once, untimed."""
    say(f"writing {format_bytes(nbytes)} to a file")
    for offset in range(0, nbytes, block.nbytes):
        os.pwritev(file.fd, [block[: nbytes - offset]], offset)


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes per second of one round; `mixed` counts both directions together."""

    read: float
    write: float
    mixed: float

    def seconds(self, read_nbytes: int, written_nbytes: int) -> float:
        """The least time for these bytes: reads and writes one after the other or mixed, whichever
        is faster here."""
        apart = read_nbytes / self.read + written_nbytes / self.write
        return min(apart, (read_nbytes + written_nbytes) / self.mixed)


class ThreadsLoop:
    """Moves the whole blocks of the first `nbytes` of a file, once, in either direction: threads,
    each with one of `blocks` as its buffer, take the next block when they are done."""

    def __init__(self, file: SwapFile, blocks: list[memoryview], nbytes: int) -> None:
        self.file, self._blocks, self._block = file, blocks, blocks[0].nbytes
        self.name = f"threads, {len(blocks)} x {self._block / _MIB:g} MiB"
        self.nbytes = nbytes // self._block * self._block
        self._pool = ThreadPoolExecutor(len(blocks), thread_name_prefix="offload-bench-io")

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
                move = os.pwritev if write else os.preadv
                count = move(self.file.fd, [part], index * self._block)
                if count < part.nbytes:
                    raise StorageError(f"a raw loop moved {count} of {part.nbytes} bytes at a time")

        try:
            for done in [self._pool.submit(work, part) for part in self._blocks]:
                done.result()
        finally:
            todo = iter(())

    def speed(self, read_share: float) -> DiskSpeed:
        """Measure one round; the mix has `read_share` of its bytes read."""
        read_s = seconds_of(lambda: self.run(write=False))
        write_s = seconds_of(lambda: self.run(write=True))
        read = round(self.nbytes // self._block * read_share) * self._block
        mixed_s = seconds_of(lambda: self.mixed(read, self.nbytes - read))
        return DiskSpeed(self.nbytes / read_s, self.nbytes / write_s, self.nbytes / mixed_s)

    def close(self) -> None:
        self._pool.shutdown()


def _mix(reads: int, writes: int) -> Iterator[tuple[int, bool]]:
    """Block numbers, and whether each is written, the rarer kind spread among the other."""
    turns = [((i + 0.5) / reads, i, False) for i in range(reads)]
    turns += [((i + 0.5) / writes, i, True) for i in range(writes)]
    return ((index, write) for _, index, write in sorted(turns))
