"""Files that are written while the next bytes are read and hashed.

What is appended is copied into page-aligned blocks, which go to the device around the page cache
where the file system allows that (O_DIRECT): a copy into the cache costs several times as much of
the processor, which training needs, and drives other files out of it. Threads that can be left
(`hands`) make the calls, two at a time, so that the device always has the next one:

    caller     ├ hash, copy 0 ┤├ hash, copy 1 ┤├ hash, copy 2 ┤├ hash, copy 3 ┤
    hand       ................├──────── write 0 ────────┤├──────── write 2 ────────┤
    hand       ................................├──────── write 1 ────────┤├──────── write 3 ───
    hand       of a file before it:  ├─ sync ─┤

Blocks end at multiples of their size in the file. The part pages at both ends of a stream are
written through the cache, as other streams have the rest of them.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from offload.checkpoint.format.disk import OpenFile, new_file, storage_errors
from offload.swap.io.hands import Call
from offload.swap.io.swap_file import UNSUPPORTED, fallocate, file_system_of
from offload.tiers.host_region import AnonymousMemory
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import round_up

# fewer take longer: a thread is woken for each
BLOCK_NBYTES = 8 << 20
MOST_BLOCKS = 4  # that are written, or wait for it; what is appended meanwhile waits
_DIRECT_HANDS = 2
MOST_SYNCS = 4  # files; each is open, with its threads

_LEAST_NBYTES = 64 << 10  # of a block, to have memory that is kept
_FILE_FLAGS = os.O_WRONLY | os.O_CLOEXEC

_log = logging.getLogger("offload")
_said: set[int] = set()  # devices that are written through the page cache


class WriteBehind:
    """Writes files while its caller goes on. A context manager: without `finish` inside, what was
    not written yet may never be. It must not be used by several threads at once.

    An error is raised by a later method, at `finish` at the latest. Memory: at most `MOST_BLOCKS`
    blocks beside one for each stream that is open.
    """

    def __init__(self) -> None:
        self._writes: deque[_Write] = deque()
        self._syncs: deque[_Sync] = deque()
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
            self._end_sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        """Close the open files. What was not written yet may never be."""
        for file in self._files:
            file.close()

    # ---------------------------------------------------------------- for files
    def memory(self, nbytes: int) -> AlignedMemory:
        """Memory for a block. It is reused, except for that of headers and the like: touching a new
        page takes longer than copying its content."""
        if nbytes < _LEAST_NBYTES:
            return AlignedMemory(nbytes)
        return self._free.pop() if self._free else AlignedMemory(BLOCK_NBYTES)

    def write(self, file: BehindFile, memory: AlignedMemory, data: memoryview, offset: int) -> None:
        """Begin to write `data`, a part of `memory`, which is reused afterwards. Waits if too much
        is under way."""
        while len(self._writes) >= MOST_BLOCKS or (self._writes and self._writes[0].has_ended):
            self._end_write()
        self._writes.append(_Write(file, memory, file.begin_write(data, offset)))

    def finish_file(self, file: BehindFile) -> None:
        """Sync and close a file, once all blocks before are written."""
        if self._writes:
            self._writes[-1].last_of.append(file)
        else:
            self._begin_sync(file)

    def _end_write(self) -> None:
        write = self._writes.popleft()
        write.file.end_write(write.parts)
        if write.memory.nbytes == BLOCK_NBYTES:
            self._free.append(write.memory)
        for file in write.last_of:
            self._begin_sync(file)

    def _begin_sync(self, file: BehindFile) -> None:
        while len(self._syncs) >= MOST_SYNCS or (self._syncs and self._syncs[0].has_ended):
            self._end_sync()
        self._syncs.append(_Sync(file, file.begin_sync()))

    def _end_sync(self) -> None:
        sync = self._syncs.popleft()
        sync.file.end_sync(sync.calls)
        self._files.remove(sync.file)


@dataclass(slots=True)
class _Part:
    """One call of a block's write."""

    file: OpenFile
    data: memoryview
    offset: int
    call: Call[int]


class _Write:
    """A block that is being written."""

    def __init__(self, file: BehindFile, memory: AlignedMemory, parts: list[_Part]) -> None:
        self.file, self.memory, self.parts = file, memory, parts
        self.last_of: list[BehindFile] = []  # files that are complete with it

    @property
    def has_ended(self) -> bool:
        return all(part.call.has_returned for part in self.parts)


@dataclass(slots=True)
class _Sync:
    """A file whose sync is under way."""

    file: BehindFile
    calls: list[Call[None]]

    @property
    def has_ended(self) -> bool:
        return all(call.has_returned for call in self.calls)


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
        self._behind = behind
        self._uncached = 0  # bytes in the cache that the device was not asked to write yet
        self._direct: list[OpenFile] = []
        self._is_direct = True
        self._turn = 0
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
                self._file.result(self._file.begin("fallocate", fallocate, 0, self.nbytes))
            except OSError as error:
                if error.errno not in UNSUPPORTED:  # such a file system finds room as it writes
                    raise

    def _open_direct(self) -> None:
        with storage_errors("opening", self.path):
            try:
                for _ in range(_DIRECT_HANDS):
                    flags = _FILE_FLAGS | os.O_DIRECT
                    self._direct.append(OpenFile("open", self.path, self.path, flags))
            except OSError as error:
                self._no_direct(error)

    def _no_direct(self, error: OSError) -> None:
        """Write through the cache from now on. Logged once for each file system."""
        if error.errno not in UNSUPPORTED:
            raise error
        self._is_direct = False
        device = self._file.status().st_dev
        if device not in _said:
            _said.add(device)
            _log.warning(
                "%s (%s) refuses O_DIRECT (%s): checkpoints there go through the page cache, which "
                "takes more of the processor",
                self.path.parent, file_system_of(self.path.parent), error.strerror,
            )  # fmt: skip

    def stream(self, start_bytes: int, nbytes: int) -> Stream:
        """A range of the file, to be filled from its front to its end."""
        return Stream(self, self._behind, start_bytes, nbytes)

    def finish(self) -> None:
        """Sync the file, whose streams are all complete."""
        self._behind.finish_file(self)

    # ---------------------------------------------------------------- for WriteBehind
    def begin_write(self, data: memoryview, offset: int) -> list[_Part]:
        """Begin to write it. Partial pages go through the cache."""
        first = min(round_up(offset, PAGE_NBYTES) - offset, data.nbytes)
        last = max(first, (offset + data.nbytes) // PAGE_NBYTES * PAGE_NBYTES - offset)
        direct = self._file
        if self._is_direct:
            self._turn = (self._turn + 1) % _DIRECT_HANDS
            direct = self._direct[self._turn]
        spans = (self._file, 0, first), (direct, first, last), (self._file, last, data.nbytes)
        return [
            self._begin_part(file, data[start:stop], offset + start)
            for file, start, stop in spans if start < stop
        ]  # fmt: skip

    def _begin_part(self, file: OpenFile, data: memoryview, offset: int) -> _Part:
        call = file.begin("pwrite", os.pwrite, data, offset, offset=offset, n=data.nbytes)
        return _Part(file, data, offset, call)

    def end_write(self, parts: list[_Part]) -> None:
        """Wait until the device, or the page cache, has all of it."""
        for part in parts:
            with storage_errors("writing", self.path, part.offset, part.data.nbytes):
                done = self._written(part)
            if done < part.data.nbytes:
                self._file.write_all(part.data[done:], part.offset + done)
            if part.file is self._file or done < part.data.nbytes:
                self._cached(part.data.nbytes)

    def _written(self, part: _Part) -> int:
        try:
            return part.file.result(part.call)
        except OSError as error:
            if part.file is self._file:
                raise
            self._no_direct(error)  # some file systems take the flag and refuse the write
            return 0

    def _cached(self, nbytes: int) -> None:
        self._uncached += nbytes
        if self._uncached >= BLOCK_NBYTES:
            self._file.start_writeback()
            self._uncached = 0

    def begin_sync(self) -> list[Call[None]]:
        """Begin to sync the file, and to drop it from the page cache."""
        # written once and not read soon: leave the page cache to the training data
        return [*self._file.begin_sync(self.nbytes), self._file.begin_forget()]

    def end_sync(self, calls: list[Call[None]]) -> None:
        """Wait until the file is on the device, and close it."""
        with storage_errors("writing", self.path):
            for call in calls:
                self._file.result(call)
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        for file in (self._file, *self._direct):
            file.close()


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
            self._memory = self._behind.memory(nbytes)

    def _send(self) -> None:
        memory, self._memory = self._memory, None
        assert memory is not None, "a block was filled"
        inset = self._begin % PAGE_NBYTES
        data = memory.array[inset : inset + self._stop - self._begin].data
        self._behind.write(self._file, memory, data, self._begin)
