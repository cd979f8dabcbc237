"""The data files of a checkpoint: every byte that they give has been compared with its hash.

A read is cut into the blocks that it lies in (see `blocks`). One that is wanted whole goes straight
into the caller's memory, and is hashed there; one that is wanted in part stays for the next read,
until its end was taken. So a section that is read from its front to its end, in any pieces, is read
once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from offload.checkpoint.format.blocks import BLOCK_NBYTES, DIGITS, block_hash
from offload.checkpoint.format.disk import OpenFile
from offload.checkpoint.format.manifest import Manifest, SectionRecord
from offload.tiers.errors import CheckpointError
from offload.tiers.units import format_bytes

REMEDY = "load another checkpoint, or restore this one from a copy"
_AHEAD_NBYTES = 16 << 20
_KEPT_NBYTES = 8 * BLOCK_NBYTES  # of blocks read in part: one of each field of an optimizer
_MOST_OPEN = 4


@dataclass(frozen=True, slots=True)
class _Block:
    section: str
    start: int  # in the file
    nbytes: int
    xxh3: str

    def __str__(self) -> str:
        return f"{self.section} ({format_bytes(self.nbytes)} at byte {self.start})"


class _File:
    """One file, open until it is closed."""

    def __init__(self, file: OpenFile, bound_to: str, sections: list[SectionRecord]) -> None:
        self.file = file
        self._bound_to = bound_to
        self._starts: list[int] = []
        self._sections: list[SectionRecord] = []
        end = 0
        for section in sections:
            if section.nbytes:
                self._starts.append(end)
                self._sections.append(section)
            end += section.nbytes

    def block_at(self, offset_bytes: int) -> _Block:
        """The block that this byte of the file lies in."""
        index = bisect_right(self._starts, offset_bytes) - 1
        return self._block(index, (offset_bytes - self._starts[index]) // BLOCK_NBYTES)

    def _block(self, index: int, number: int) -> _Block:
        section, first = self._sections[index], number * BLOCK_NBYTES
        nbytes = min(BLOCK_NBYTES, section.nbytes - first)
        digits = slice(number * DIGITS, (number + 1) * DIGITS)
        return _Block(section.name, self._starts[index] + first, nbytes, section.xxh3[digits])

    def sections(self) -> Iterator[Iterator[_Block]]:
        """All blocks, section by section."""
        for index, section in enumerate(self._sections):
            count = len(section.xxh3) // DIGITS
            yield (self._block(index, number) for number in range(count))

    def fill(self, into: memoryview, block: _Block) -> str | None:
        """Read a whole block. Returns what is wrong with it, or None."""
        self.file.read_ahead(block.start + _AHEAD_NBYTES, block.nbytes)
        self.file.read_all(into, block.start)
        found = block_hash(into, self._bound_to, block.start)
        if found == block.xxh3:
            return None
        return f"{self.file.path} is damaged: {block} has XXH3 {found} instead of {block.xxh3}"


class CheckedFiles:
    """Reads a checkpoint's files. `open_file` opens one by its name."""

    def __init__(self, manifest: Manifest, open_file: Callable[[str], OpenFile]) -> None:
        self._manifest = manifest
        self._open_file = open_file
        self._open: OrderedDict[str, _File] = OrderedDict()  # used last at the end, as of the next
        self._kept: OrderedDict[tuple[str, int], bytearray] = OrderedDict()
        self._kept_nbytes = 0
        self._spare: list[bytearray] = []  # at most one: fresh memory costs as much as a copy

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].file.close()
        self._kept.clear()

    # ---------------------------------------------------------------- reading
    def read_into(self, name: str, offset_bytes: int, buffer: memoryview) -> None:
        """Fill `buffer` with a file's bytes from `offset_bytes` on; the file must have them.

        CheckpointError if they, or others of their blocks, are not what was written; StorageError.
        The content of `buffer` is undefined then.
        """
        file = self._file(name)
        buffer = buffer.cast("B")
        done = 0
        while done < buffer.nbytes:
            at = offset_bytes + done
            block = file.block_at(at)
            skipped = at - block.start
            count = min(block.nbytes - skipped, buffer.nbytes - done)
            into = buffer[done : done + count]
            if count == block.nbytes:
                self._fill(file, into, block)
            else:
                into[:] = self._whole(name, file, block)[skipped : skipped + count]
                if skipped + count == block.nbytes:
                    self._drop((name, block.start))
            done += count

    def _whole(self, name: str, file: _File, block: _Block) -> memoryview:
        """The whole block, for a read of a part of it."""
        key = name, block.start
        found = self._kept.get(key)
        if found is None:
            whole = block.nbytes == BLOCK_NBYTES
            found = self._spare.pop() if whole and self._spare else bytearray(block.nbytes)
            self._fill(file, memoryview(found), block)
            self._kept[key] = found
            self._kept_nbytes += len(found)
            while self._kept_nbytes > _KEPT_NBYTES:
                self._drop(next(iter(self._kept)))
        else:
            self._kept.move_to_end(key)
        return memoryview(found)

    def _drop(self, key: tuple[str, int]) -> None:
        dropped = self._kept.pop(key)
        self._kept_nbytes -= len(dropped)
        if len(dropped) == BLOCK_NBYTES:
            self._spare[:] = [dropped]

    @staticmethod
    def _fill(file: _File, into: memoryview, block: _Block) -> None:
        problem = file.fill(into, block)
        if problem is not None:
            raise CheckpointError(f"{problem}; {REMEDY}")

    def _file(self, name: str) -> _File:
        found = self._open.get(name)
        if found is None:
            sections, bound_to = self._manifest.files[name].sections, self._manifest.bound_to(name)
            found = self._open[name] = _File(self._open_file(name), bound_to, sections)
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)[1].file.close()
        self._open.move_to_end(name)
        return found

    # ---------------------------------------------------------------- checks
    def problems(self, name: str, came: Callable[[int], None]) -> Iterator[str]:
        """The first damaged block of each section of a file, as a message."""
        try:
            file = self._file(name)
        except CheckpointError as error:
            yield str(error)
            return
        buffer = memoryview(bytearray(BLOCK_NBYTES))
        for section in file.sections():
            found = None
            for block in section:
                found = found or file.fill(buffer[: block.nbytes], block)
                came(block.nbytes)
            if found is not None:
                yield found
