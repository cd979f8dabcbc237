"""Files that a thread writes while the next bytes are read and hashed.

What is appended is copied into page-aligned blocks, which go to the device around the page cache
where the file system allows that (O_DIRECT): a copy into the cache costs several times as much of
the processor, which training needs, and drives other files out of it.

    caller     ├ hash, copy 0 ┤├ hash, copy 1 ┤├ hash, copy 2 ┤
    thread                     ├─── write 0 ───┤├─── write 1 ───┤├─── write 2 ───┤├ sync ┤

Blocks end at multiples of their size in the file. The part pages at both ends of a stream are
written through the cache, as other streams have the rest of them.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from offload.checkpoint.disk import OpenFile, new_file, storage_errors
from offload.swap.shield import uninterrupted
from offload.tiers.anonymous_memory import AnonymousMemory
from offload.tiers.extent import PAGE_NBYTES
from offload.tiers.units import round_up

# fewer take longer: a thread is woken for each, and a disk has one at a time
BLOCK_NBYTES = 8 << 20
MOST_QUEUED = 3  # blocks; what is appended meanwhile waits

_LEAST_NBYTES = 64 << 10  # of a block, to have memory that is kept
_FILE_FLAGS = os.O_WRONLY | os.O_CLOEXEC


class WriteBehind:
    """Writes files on a thread. A context manager: without `finish` inside, what was not written
    yet never is. Not to be appended to by several threads at once.

    An error of the thread is raised by whatever is asked of it next, and nothing is written after
    it. Memory: at most `MOST_QUEUED` blocks beside one for each stream that is open.
    """

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(MOST_QUEUED)
        self._free: list[AlignedMemory] = []  # of whole blocks; append and pop are atomic
        self._files: list[BehindFile] = []
        self._failure: BaseException | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None

    def create(self, path: Path) -> BehindFile:
        """A new file. StorageError if it cannot be."""
        file = BehindFile(path, self)
        self._files.append(file)
        return file

    def finish(self) -> None:
        """Wait until all files that were finished are on the device."""
        ended = threading.Event()
        self._todo.put(ended.set)
        ended.wait()
        self._raise_failure()

    def __enter__(self) -> Self:
        # now: it may be needed once the program has begun to end
        self._thread = threading.Thread(
            target=_serve, args=(self._todo,), name="offload-checkpoint-files", daemon=True
        )
        self._thread.start()
        return self

    def __del__(self) -> None:
        self._todo.put(None)  # a Ctrl-C may come between the thread's start and the `with`

    @uninterrupted  # a descriptor must not be closed while the thread writes to it
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._stopped = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._todo.put(None)
            thread.join()
        for file in self._files:
            file.close()

    # ---------------------------------------------------------------- for files
    def memory(self, nbytes: int) -> AlignedMemory:
        """For a block. It is used again, but for that of headers and the like: to touch a new page
        takes longer than to copy what is in it."""
        self._raise_failure()
        if nbytes < _LEAST_NBYTES:
            return AlignedMemory(nbytes)
        try:
            return self._free.pop()
        except IndexError:
            return AlignedMemory(BLOCK_NBYTES)

    def put(self, file: BehindFile, memory: AlignedMemory, data: memoryview, offset: int) -> None:
        """Write `data`, a part of `memory`, which is used again then. Waits for room in the
        queue."""
        self._room.acquire()
        self._todo.put(partial(self._write, file, memory, data, offset))
        self._raise_failure()

    def sync(self, file: BehindFile) -> None:
        """Put a file on the device and close it, once all before is written."""
        self._todo.put(partial(self._unless_failed, file.sync))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---------------------------------------------------------------- on the thread
    def _write(
        self, file: BehindFile, memory: AlignedMemory, data: memoryview, offset: int
    ) -> None:
        self._unless_failed(partial(file.write, data, offset))
        if memory.nbytes == BLOCK_NBYTES:
            self._free.append(memory)
        self._room.release()

    def _unless_failed(self, work: Callable[[], None]) -> None:
        if self._failure is not None or self._stopped:
            return
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._failure = error


def _serve(todo: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := todo.get()) is not None:
        work()
        del work  # it refers to a block's memory, and to whose thread this is


class AlignedMemory:
    """Whole pages for a block, and one more, as it may begin within a page of its file."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = AnonymousMemory(round_up(nbytes, PAGE_NBYTES) + PAGE_NBYTES)
        self.array = np.frombuffer(self._memory, np.uint8)


class BehindFile:
    """A file that a `WriteBehind` writes. It is closed with the object at the latest."""

    def __init__(self, path: Path, behind: WriteBehind) -> None:
        self.path = path
        self._behind = behind
        self._direct: OpenFile | None = None
        self._uncached = 0  # bytes in the cache that the device was not asked to write yet
        self._file = new_file(path)
        with suppress(OSError):  # of such a file system all goes through the cache
            self._direct = OpenFile("open", path, path, _FILE_FLAGS | os.O_DIRECT)

    def stream(self, start_bytes: int, nbytes: int) -> Stream:
        """A range of the file, to be filled from its front to its end."""
        return Stream(self, self._behind, start_bytes, nbytes)

    def finish(self) -> None:
        """All streams are complete: put it on the device."""
        self._behind.sync(self)

    # ---------------------------------------------------------------- on the thread
    def write(self, data: memoryview, offset: int) -> None:
        """Blocks until the device, or the page cache, has all of it."""
        first = min(round_up(offset, PAGE_NBYTES) - offset, data.nbytes)
        last = max(first, (offset + data.nbytes) // PAGE_NBYTES * PAGE_NBYTES - offset)
        self._write_cached(data[:first], offset)
        whole = data[first:last]
        done = self._write_direct(whole, offset + first) if whole.nbytes else 0
        self._write_cached(whole[done:], offset + first + done)
        self._write_cached(data[last:], offset + last)

    def _write_direct(self, data: memoryview, offset: int) -> int:
        """Whole pages; how much of it was written."""
        if self._direct is None:
            return 0
        done = 0
        with storage_errors("writing", self.path, offset, data.nbytes):
            while done < data.nbytes and not done % PAGE_NBYTES:
                try:
                    done += self._direct.write_some(data[done:], offset + done)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._direct.close()  # some file systems take the flag and refuse the write
                    self._direct = None
                    break
        return done

    def _write_cached(self, data: memoryview, offset: int) -> None:
        if not data.nbytes:
            return
        self._file.write_all(data, offset)
        self._uncached += data.nbytes
        if self._uncached >= BLOCK_NBYTES:
            self._file.start_writeback()
            self._uncached = 0

    def sync(self) -> None:
        """Wait until the file is on the device, and close it."""
        self._file.sync()
        # written once and not read soon: leave the page cache to the training data
        self._file.forget(0, 0)
        self.close()

    def close(self) -> None:
        """Calling it again does nothing."""
        self._file.close()
        if self._direct is not None:
            self._direct.close()


class Stream:
    """A range of a file that is being filled. Its last block goes to the file once it is full."""

    def __init__(self, file: BehindFile, behind: WriteBehind, start: int, nbytes: int) -> None:
        self._file = file
        self._behind = behind
        self._at = start
        self._end = start + nbytes
        self._memory: AlignedMemory | None = None
        self._begin = self._stop = 0  # of the block, in the file

    def append(self, data: memoryview) -> None:
        """The next bytes, which may change afterwards. Waits where the file falls behind."""
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
        self._memory = self._behind.memory(self._stop - self._begin)

    def _send(self) -> None:
        memory, self._memory = self._memory, None
        assert memory is not None, "a block was filled"
        inset = self._begin % PAGE_NBYTES
        data = memory.array[inset : inset + self._stop - self._begin].data
        self._behind.put(self._file, memory, data, self._begin)
