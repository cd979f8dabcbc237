"""Blocks of bytes in swap files: written to a new extent, checked when read back.

A write never touches the extent it replaces. The old one is the undo record:

    write(source, replaces=old)     old: valid          new: being written
    ... fails                       old: valid          new: freed
    ... succeeds                    old: freed, once no read of it is left         new: valid
                                         and no caller keeps it
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from offload.swap.io.io_backend import IOBackend, Priority
from offload.swap.io.requests_and_retries import Operation
from offload.swap.io.swap_file import SwapFile
from offload.swap.threads.shield import defer_signals
from offload.swap.threads.transfer import Transfer
from offload.tiers.errors import ChecksumError, NoSpaceError, StateError
from offload.tiers.file_tier import FileTier
from offload.tiers.tier import Extent
from offload.tiers.units import format_bytes, round_up

GROWTH_NBYTES = 256 << 20  # files grow in steps: a reservation costs a journal entry
_BRIEF_NBYTES = 512 << 10  # for so few, letting go of the GIL takes longer than the checksum


def checksum_of(buffer: memoryview) -> int:
    """XXH3-64, of many bytes with the GIL released: before xxhash 4, only `update` did that."""
    if buffer.nbytes <= _BRIEF_NBYTES:
        return xxhash.xxh3_64_intdigest(buffer)
    digest = xxhash.xxh3_64()
    digest.update(buffer)
    return digest.intdigest()


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Bytes that are safely stored. Never changes: writing again makes another block."""

    extent: Extent
    nbytes: int
    checksum: int  # XXH3-64 of the bytes
    owner: str
    version: int  # tells it from every other block that ever had this extent


@dataclass(slots=True, eq=False)
class _LiveBlock:
    """The state of one live block. Its extent goes back to the tier when `doomed`, unread and not
    kept any more."""

    block: StoredBlock
    readers: int = 0
    keepers: int = 0
    doomed: bool = False


@dataclass(slots=True, eq=False)
class _Write:
    """One write on its way: what its worker and its completion need to know."""

    extent: Extent
    source: memoryview
    owner: str
    replaces: StoredBlock | None
    committed: Callable[[StoredBlock], object] | None
    checksum: int = 0  # once it is computed
    is_stored: bool = False

    def compute_checksum(self) -> None:
        self.checksum = checksum_of(self.source)


class BlockStore:
    """Blocks over several files, one per path; `tier` picks the path of each extent.

    Thread-safe: `lock` guards the tier and the books, here and wherever else that tier is used;
    it is never held while bytes move. Owns `files` and `backend`: `close` closes them.
    """

    def __init__(
        self, files: Sequence[SwapFile], tier: FileTier, backend: IOBackend, *,
        lock: threading.RLock | None = None, growth_nbytes: int = GROWTH_NBYTES,
    ) -> None:  # fmt: skip
        if not files:
            raise ValueError("a block store needs at least one file")
        self.files = tuple(files)
        self.backend = backend
        self._tier = tier
        self._lock = threading.RLock() if lock is None else lock
        self._freed = threading.Condition(self._lock)  # told of every extent that comes back
        self._frees = self._writes = 0  # extents freed so far, writes in flight
        self._waiting = 0  # threads in `await_room`
        self._growth_nbytes = growth_nbytes
        self._records: dict[int, _LiveBlock] = {}  # by version
        self._versions = itertools.count(1)

    @defer_signals
    def write(
        self, source: memoryview, *, owner: str, state_class: Any,
        replaces: StoredBlock | None = None, priority: Priority = Priority.NORMAL,
        committed: Callable[[StoredBlock], object] | None = None,
    ) -> Transfer[StoredBlock]:  # fmt: skip
        """Store `source` in a new extent; the value is the block to read it back with.
        `committed` is called with it as soon as it is stored, with the store's lock held.

        `source` must not change until then. `replaces` stays readable until the write has
        succeeded and is freed then; if it fails it stays valid and the new extent is freed.
        With O_DIRECT, `source` must be page-aligned and whole pages long (pass the padded
        buffer). Raises TierFullError and NoSpaceError at once, other errors at `wait()`. Does not
        block on I/O, except to make a file longer.
        """
        with self._lock:
            if replaces is not None:
                self._live(replaces)
            extent = self._allocate(source.nbytes, owner, state_class)
            self._writes += 1
        write = _Write(extent, source, owner, replaces, committed)
        file = self.files[extent.path_index]
        try:
            moved = self.backend.submit(
                Operation.WRITE, file.fd, source, extent.offset_bytes, path=file.path,
                priority=priority, before=write.compute_checksum,
                after=lambda: self._commit(write), owner=owner,
            )  # fmt: skip
        except BaseException:
            self._roll_back(write)
            raise
        moved.then(lambda _: None if write.is_stored else self._roll_back(write))
        return moved

    @defer_signals
    def read(
        self, block: StoredBlock, destination: memoryview, *, priority: Priority = Priority.NORMAL
    ) -> Transfer[None]:
        """Fill `destination`, exactly `block.nbytes` long, and compare the checksum.

        Mutates `destination` until the transfer is done. The block may be freed or replaced
        meanwhile: its extent is kept until the read has ended. Alignment as in `write`.
        Raises ValueError and StateError (a block that is freed, and not kept) at once;
        ChecksumError and StorageError at `wait()`, when the contents of `destination` are
        undefined.
        """
        if destination.nbytes != block.nbytes:
            raise ValueError(
                f"{block.owner}: read of {block.nbytes} bytes into {destination.nbytes}"
            )
        with self._lock:
            record = self._records.get(block.version)
            if record is None or not record.keepers:
                record = self._live(block)
            record.readers += 1
        file, extent = self.files[block.extent.path_index], block.extent
        try:
            moved = self.backend.submit(
                Operation.READ, file.fd, destination, extent.offset_bytes, path=file.path,
                priority=priority, owner=block.owner,
                after=lambda: self._verify(block, destination),
            )  # fmt: skip
        except BaseException:
            self._end_reading(record)
            raise
        moved.then(lambda _: self._end_reading(record))
        return moved

    @defer_signals
    def free(self, block: StoredBlock) -> None:
        """Forget `block`; its extent goes back to the tier, after the reads of it in flight.

        StateError if it is freed already. No write may be about to replace it.
        """
        with self._lock:
            self._doom(self._live(block))

    @defer_signals
    def keep(self, block: StoredBlock) -> None:
        """Let `block` be readable until `let_go`, also when it is freed or replaced meanwhile."""
        with self._lock:
            self._live(block).keepers += 1

    @defer_signals
    def let_go(self, block: StoredBlock) -> None:
        """The reverse of `keep`."""
        with self._lock:
            record = self._records[block.version]
            record.keepers -= 1
            self._free_if_unread(record)

    @defer_signals
    def await_room(self) -> bool:
        """Block until an extent comes back to the tier; False if nothing in flight frees one.

        For a write that found the tier full of versions that are just being replaced. Lets go of
        the store's lock meanwhile, however often the caller holds it. Never call it from a
        callback.
        """
        with self._lock:
            frees = self._frees
            while self._frees == frees:
                if not self._writes and not any(r.doomed for r in self._records.values()):
                    return False
                self._waiting += 1
                try:
                    with self.backend.lane.waiting():
                        self._freed.wait()
                finally:
                    self._waiting -= 1
            return True

    @defer_signals
    def close(self) -> None:
        """Finish what is in flight and close backend and files: all blocks are gone. Idempotent."""
        try:
            self.backend.close()
        finally:
            for file in self.files:
                if not self.backend.is_lost(file.fd):  # else a later file would get its number
                    file.close()

    # ---- the life of a block (with or without the lock, which is reentrant)

    def _allocate(self, nbytes: int, owner: str, state_class: Any) -> Extent:
        lengths = [file.nbytes for file in self.files]
        extent = self._tier.allocate(nbytes, owner, state_class, lengths)
        try:
            self._reserve(extent)
        except BaseException:
            self._tier.free(extent)
            raise
        return extent

    def _reserve(self, extent: Extent) -> None:
        file, end = self.files[extent.path_index], extent.offset_bytes + extent.nbytes
        if end <= file.nbytes:
            return
        spare = self._tier.spare_nbytes([file.nbytes for file in self.files])
        share = file.nbytes + spare // len(self.files)  # the other paths' files grow, too
        try:
            file.reserve(max(end, min(round_up(end, self._growth_nbytes), share)))
        except NoSpaceError:  # no room for a whole step: what is needed may still fit
            file.reserve(end)

    def _commit(self, write: _Write) -> StoredBlock:
        with self._lock:
            block = StoredBlock(
                write.extent, write.source.nbytes, write.checksum, write.owner,
                next(self._versions),
            )  # fmt: skip
            self._records[block.version] = _LiveBlock(block)
            write.is_stored = True
            self._writes -= 1
            self._wake()
            if write.replaces is not None:
                self._doom(self._records[write.replaces.version])
            if write.committed is not None:
                write.committed(block)
            return block

    def _roll_back(self, write: _Write) -> None:
        with self._lock:
            self._writes -= 1
            self._free_extent(write.extent)

    def _live(self, block: StoredBlock) -> _LiveBlock:
        record = self._records.get(block.version)
        if record is None or record.doomed:
            raise StateError(f"{block.owner}: block {block.version} is used after it was freed")
        return record

    def _doom(self, record: _LiveBlock) -> None:
        record.doomed = True
        self._free_if_unread(record)

    def _end_reading(self, record: _LiveBlock) -> None:
        with self._lock:
            record.readers -= 1
            self._free_if_unread(record)

    def _free_if_unread(self, record: _LiveBlock) -> None:
        if record.doomed and not record.readers and not record.keepers:
            del self._records[record.block.version]
            self._free_extent(record.block.extent)

    def _free_extent(self, extent: Extent) -> None:
        self._tier.free(extent)
        self._frees += 1
        self._wake()

    def _wake(self) -> None:
        """Let those in `await_room` look again."""
        if self._waiting:
            self._freed.notify_all()

    def _verify(self, block: StoredBlock, destination: memoryview) -> None:
        checksum = checksum_of(destination)
        if checksum == block.checksum:
            return
        path, offset = self.files[block.extent.path_index].path, block.extent.offset_bytes
        raise ChecksumError(
            f"{block.owner}: {format_bytes(block.nbytes)} at offset {offset} of {path} are not "
            f"what was written (XXH3 {checksum:016x}, not {block.checksum:016x}); the device or "
            "memory is faulty: see `dmesg`, and resume from the last checkpoint",
            path=path, offset_bytes=offset, nbytes=block.nbytes,
        )  # fmt: skip
