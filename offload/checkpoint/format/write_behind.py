"""Files that are written while the next bytes are read and hashed.

What is appended is copied into page-aligned blocks, which go to the device around the page cache
where the file system allows that (O_DIRECT): a copy into the cache costs several times as much of
the processor, which training needs, and drives other files out of it. Two threads write, so that
the device always has the next block:

    caller     ├ hash, copy 0 ┤├ hash, copy 1 ┤├ hash, copy 2 ┤├ hash, copy 3 ┤
    thread     ................├──────── write 0 ────────┤├──────── write 2 ────────┤
    thread     ................................├──────── write 1 ────────┤├──────── write 3 ───
    thread     of a file before it:  ├─ sync ─┤

Blocks end at multiples of their size in the file. The part pages at both ends of a stream are
written through the cache, as other streams have the rest of them.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np

from offload.checkpoint.format.disk import OpenFile, make_call, new_file, storage_errors
from offload.swap.io.swap_file import UNSUPPORTED, fallocate, file_system_of
from offload.swap.threads.shield import Executor, is_done, result_of
from offload.tiers.anonymous_memory import AnonymousMemory
from offload.tiers.errors import StorageError
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import round_up

# fewer take longer: a thread is woken for each
BLOCK_NBYTES = 8 << 20
MOST_BLOCKS = 4  # that are written, or wait for it; what is appended meanwhile waits
_WRITERS = 2
MOST_SYNCS = 4  # files, each of which is open

_LEAST_NBYTES = 64 << 10  # of a block, to have memory that is kept

_log = logging.getLogger("offload")
_said: set[int] = set()  # devices that are written through the page cache


class WriteBehind:
    """Writes files while its caller goes on. A context manager: without `finish` inside, what was
    not written yet may never be. It must not be used by several threads at once.

    An error is raised by a later method, at `finish` at the latest. Memory: at most `MOST_BLOCKS`
    blocks beside one for each stream that is open.
    """

    def __init__(self) -> None:
        self._writers = Executor(_WRITERS, thread_name_prefix="offload-write")
        self._syncers = Executor(MOST_SYNCS, thread_name_prefix="offload-sync")
        self._writes: deque[tuple[Future[None], AlignedMemory]] = deque()
        self._syncs: deque[Future[None]] = deque()
        self._free: list[AlignedMemory] = []  # of whole blocks
        self._files: list[BehindFile] = []

    def create(self, path: Path, nbytes: int) -> BehindFile:
        """A new file of `nbytes`. StorageError if it cannot be made."""
        file = BehindFile(path, nbytes, self)
        self._files.append(file)
        return file

    def finish(self) -> None:
        """Wait until all files that were finished are on the device."""
        while self._writes:
            self._end_write()
        while self._syncs:
            result_of(self._syncs.popleft())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the open files, once their calls have returned. What was not written yet may never
        be."""
        for threads in (self._writers, self._syncers):
            threads.shutdown(cancel_futures=True)
        for file in self._files:
            file.close()

    # ---------------------------------------------------------------- for files
    def memory(self, nbytes: int) -> AlignedMemory:
        """Memory for a block. It is reused, except for that of headers and the like: touching a new
        page takes longer than copying its content."""
        if nbytes < _LEAST_NBYTES:
            return AlignedMemory(nbytes)
        return self._free.pop() if self._free else AlignedMemory(BLOCK_NBYTES)

    def write(
        self, file: BehindFile, memory: AlignedMemory, data: memoryview, offset: int
    ) -> Future[None]:
        """Begin to write `data`, a part of `memory`, which is reused afterwards. Waits if too much
        is under way."""
        while len(self._writes) >= MOST_BLOCKS or (self._writes and is_done(self._writes[0][0])):
            self._end_write()
        write = submitted(self._writers, file.path, file.write_block, data, offset)
        self._writes.append((write, memory))
        return write

    def finish_file(self, file: BehindFile, writes: list[Future[None]]) -> None:
        """Sync and close a file, once its blocks are written."""
        while len(self._syncs) >= MOST_SYNCS or (self._syncs and is_done(self._syncs[0])):
            result_of(self._syncs.popleft())
        self._files.remove(file)
        self._syncs.append(submitted(self._syncers, file.path, file.sync_and_close, writes))

    def _end_write(self) -> None:
        write, memory = self._writes.popleft()
        result_of(write)
        if memory.nbytes == BLOCK_NBYTES:
            self._free.append(memory)


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


class AlignedMemory:
    """Whole pages for a block, and one more, as it may begin within a page of its file."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = AnonymousMemory(round_up(nbytes, PAGE_NBYTES) + PAGE_NBYTES)
        self.array = np.frombuffer(self._memory, np.uint8)


class BehindFile:
    """A file that a `WriteBehind` writes. It is closed with the object at the latest."""

    def __init__(self, path: Path, nbytes: int, behind: WriteBehind) -> None:
        self.path, self.nbytes = path, nbytes
        self.behind = behind
        self.writes: list[Future[None]] = []  # of its blocks
        self._direct: OpenFile | None = None  # None: written through the page cache
        self._file = new_file(path)
        try:
            self._reserve()
            self._open_direct()
        except BaseException:
            self.close()
            raise

    def _reserve(self) -> None:
        """Reserve its room on the device in one piece: writes that extend a file run one by one."""
        with storage_errors("writing", self.path, 0, self.nbytes):
            try:
                make_call("fallocate", self.path, fallocate, self._file.fd, 0, self.nbytes)
            except OSError as error:
                if error.errno not in UNSUPPORTED:  # such a file system finds room as it writes
                    raise

    def _open_direct(self) -> None:
        with storage_errors("opening", self.path):
            try:
                self._direct = OpenFile(self.path, os.O_WRONLY | os.O_DIRECT)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                self._tell_of_cache(error)

    def _tell_of_cache(self, error: OSError) -> None:
        """Log, once for each file system, that files there are written through the cache."""
        device = self._file.status().st_dev
        if device not in _said:
            _said.add(device)
            _log.warning(
                "%s (%s) refuses O_DIRECT (%s): checkpoints there go through the page cache, which "
                "takes more of the processor",
                self.path.parent, file_system_of(self.path.parent), error.strerror,
            )  # fmt: skip

    def finish(self) -> None:
        """Sync the file, whose streams are all complete."""
        self.behind.finish_file(self, self.writes)

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
        for start, stop in ((0, first), (last, data.nbytes)):
            if start < stop:
                self._file.write_all(data[start:stop], offset + start)
        if first < last:
            self._write_pages(data[first:last], offset + first)

    def _write_pages(self, data: memoryview, offset: int) -> None:
        done = 0
        if self._direct is not None:
            with storage_errors("writing", self.path, offset, data.nbytes):
                try:
                    done = make_call("pwrite", self.path, os.pwrite, self._direct.fd, data, offset)
                except OSError as error:
                    if error.errno not in UNSUPPORTED:
                        raise
                    self._tell_of_cache(error)  # some file systems take the flag, and refuse this
        if done < data.nbytes:
            self._file.write_all(data[done:], offset + done)

    def sync_and_close(self, writes: list[Future[None]]) -> None:
        """Wait until the file is on the device, and close it."""
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
        self._memory: AlignedMemory | None = None
        self._begin = self._stop = 0  # of the block, in the file

    def append(self, data: memoryview) -> None:
        """Append the next bytes, which may change afterwards. Waits if the file falls behind."""
        given = np.frombuffer(data, np.uint8) if data.nbytes else np.empty(0, np.uint8)
        while given.size:
            if self._memory is None:
                self._begin_block()
            assert self._memory is not None, "just begun"
            count = min(given.size, self._stop - self._at)
            at = self._at - self._begin + self._begin % PAGE_NBYTES
            np.copyto(self._memory.array[at : at + count], given[:count])  # lets go of the GIL
            self._at += count
            given = given[count:]
            if self._at == self._stop:
                self._send()

    def _begin_block(self) -> None:
        self._begin = self._at
        self._stop = min((self._at // BLOCK_NBYTES + 1) * BLOCK_NBYTES, self._end)
        nbytes = self._stop - self._begin
        with storage_errors("writing", self._file.path, self._begin, nbytes):
            self._memory = self._file.behind.memory(nbytes)

    def _send(self) -> None:
        memory, self._memory = self._memory, None
        assert memory is not None, "a block was filled"
        inset = self._begin % PAGE_NBYTES
        data = memory.array[inset : inset + self._stop - self._begin].data
        file = self._file
        file.writes.append(file.behind.write(file, memory, data, self._begin))
