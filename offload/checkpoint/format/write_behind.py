"""Files that are written while the next bytes are read and hashed.

What is appended is copied into page-aligned blocks, which go to the device around the page cache
where the file system allows that (O_DIRECT): a copy into the cache costs several times as much of
the processor, which training needs, and drives other files out of it. Several threads write, so
that the device always has the next block:

    caller     ├ hash, copy 0 ┤├ hash, copy 1 ┤├ hash, copy 2 ┤├ hash, copy 3 ┤
    thread     ................├──────── write 0 ────────┤├──────── write 2 ────────┤
    thread     ................................├──────── write 1 ────────┤├── sync ──┤

Blocks end at multiples of their size in the file. The part pages at both ends of a stream are
written through the cache, as other streams have the rest of them.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np

from offload.checkpoint.format.disk import OpenFile, make_call, new_file, storage_errors
from offload.kernels.floats import Array
from offload.swap.io.swap_file import UNSUPPORTED, fallocate
from offload.swap.threads.shield import Executor, is_done, result_of
from offload.tiers.anonymous_memory import AnonymousMemory
from offload.tiers.errors import StorageError
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import round_up

# fewer take longer: a thread is woken for each
BLOCK_NBYTES = 8 << 20
MOST_BLOCKS = 4  # that are written, or wait for it; what is appended meanwhile waits
_THREADS = 4


class WriteBehind:
    """Writes files while its caller goes on. A context manager: without `finish` inside, what was
    not written yet may never be. It must not be used by several threads at once.

    An error is raised by a later method, at `finish` at the latest. Memory: at most `MOST_BLOCKS`
    blocks beside one for each stream that is open.
    """

    def __init__(self) -> None:
        self._threads = Executor(_THREADS, thread_name_prefix="offload-write")
        # writes, and syncs of files, which have no memory
        self._begun: deque[tuple[Future[None], Array | None]] = deque()
        self._free: list[Array] = []  # touching a new page takes longer than copying its content
        self._files: list[BehindFile] = []

    def create(self, path: Path, nbytes: int) -> BehindFile:
        """A new file of `nbytes`. StorageError if it cannot be made."""
        file = BehindFile(path, nbytes, self)
        self._files.append(file)
        return file

    def finish(self) -> None:
        """Wait until all files that were finished are on the device."""
        while self._begun:
            self._end_first()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the open files, once their calls have returned."""
        self._threads.shutdown(cancel_futures=True)
        for file in self._files:
            file.close()

    # ---------------------------------------------------------------- for files
    def block(self) -> Array:
        """Memory for a block, and a page more, as it may begin within a page of its file."""
        if self._free:
            return self._free.pop()
        return np.frombuffer(AnonymousMemory(BLOCK_NBYTES + PAGE_NBYTES), np.uint8)

    def begin(
        self, file: BehindFile, block: Array | None, function: object, *args: object
    ) -> Future[None]:  # fmt: skip
        """Begin a call on a thread; `block`, from which it writes, is reused afterwards. Waits if
        too much is under way."""
        while len(self._begun) >= MOST_BLOCKS or (self._begun and is_done(self._begun[0][0])):
            self._end_first()
        call = submitted(self._threads, file.path, function, *args)
        self._begun.append((call, block))
        return call

    def forget(self, file: BehindFile) -> None:
        """Leave it to its sync to close a file."""
        self._files.remove(file)

    def _end_first(self) -> None:
        call, block = self._begun.popleft()
        result_of(call)
        if block is not None:
            self._free.append(block)


def submitted(
    threads: Executor, path: Path, function: object, *args: object
) -> Future[None]:  # fmt: skip
    """Begin a call that writes `path` on a thread. StorageError if none can be started."""
    try:
        return threads.submit(function, *args)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise StorageError(
            f"{path} was not written: no thread can be started; raise the limit of processes "
            "(`ulimit -u`), of a container's tasks or of memory",
            path=str(path),
        ) from error


class BehindFile:
    """A file that a `WriteBehind` writes. It is closed with the object at the latest."""

    def __init__(self, path: Path, nbytes: int, behind: WriteBehind) -> None:
        self.path, self.behind = path, behind
        self.writes: list[Future[None]] = []  # of its blocks
        self._direct: OpenFile | None = None  # None: written through the page cache
        self._file = new_file(path)
        with storage_errors("writing", path, 0, nbytes):
            try:  # in one piece: writes that extend a file run one by one
                make_call("fallocate", path, fallocate, self._file.fd, 0, nbytes)
                self._direct = OpenFile(path, os.O_WRONLY | os.O_DIRECT)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise

    def finish(self) -> None:
        """Sync the file, whose streams are all complete."""
        self.behind.begin(self, None, self._sync_and_close, self.writes)
        self.behind.forget(self)

    def close(self) -> None:
        """Close the file. Idempotent."""
        for file in (self._file, self._direct):
            if file is not None:
                file.close()

    # ---------------------------------------------------------------- in a thread
    def write_block(self, data: memoryview, offset: int) -> None:
        """Write it to the device; partial pages go through the cache."""
        first = min(round_up(offset, PAGE_NBYTES) - offset, data.nbytes)
        last = max(first, (offset + data.nbytes) // PAGE_NBYTES * PAGE_NBYTES - offset)
        done = first
        if first < last and self._direct is not None:
            done += self._write_pages(self._direct, data[first:last], offset + first)
        for start, stop in ((0, first), (done, data.nbytes)):
            if start < stop:
                self._file.write_all(data[start:stop], offset + start)

    def _write_pages(self, file: OpenFile, data: memoryview, offset: int) -> int:
        """Write whole pages around the cache; returns the number of bytes that were written."""
        with storage_errors("writing", self.path, offset, data.nbytes):
            try:
                return make_call("pwrite", self.path, os.pwrite, file.fd, data, offset)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                return 0  # some file systems take the flag, and refuse this

    def _sync_and_close(self, writes: list[Future[None]]) -> None:
        """Wait until the file is on the device, and close it. Its writes began earlier, on threads
        that take calls in their order: so none waits for a thread that waits here."""
        try:
            for write in writes:
                write.result()
            self._file.sync()
            with suppress(StorageError):
                # written once and not read soon: leave the page cache to the training data
                self._file.forget()
        finally:
            self.close()


class Stream:
    """A range of a file that is being filled. Its last block goes to the file once it is full."""

    def __init__(self, file: BehindFile, start: int, nbytes: int) -> None:
        self._file = file
        self._at = start
        self._end = start + nbytes
        self._block: Array | None = None
        self._begin = self._stop = 0  # of the block, in the file

    def append(self, data: memoryview) -> None:
        """Append the next bytes, which may change afterwards. Waits if the file falls behind."""
        given = np.frombuffer(data, np.uint8) if data.nbytes else np.empty(0, np.uint8)
        while given.size:
            if self._block is None:
                self._begin = self._at
                self._stop = min((self._at // BLOCK_NBYTES + 1) * BLOCK_NBYTES, self._end)
                with storage_errors("writing", self._file.path, self._begin):
                    self._block = self._file.behind.block()
            inset = self._begin % PAGE_NBYTES
            at = self._at - self._begin + inset
            count = min(given.size, self._stop - self._at)
            np.copyto(self._block[at : at + count], given[:count])  # lets go of the GIL
            self._at += count
            given = given[count:]
            if self._at == self._stop:
                block, self._block, file = self._block, None, self._file
                data = block[inset : inset + self._stop - self._begin].data
                write = file.behind.begin(file, block, file.write_block, data, self._begin)
                file.writes.append(write)
