"""The data files of a checkpoint: every byte that they give has been compared with its hash.

A section (see `safetensors_file`) is cut into blocks of 2 MiB from its first byte on; its last one
is shorter. A block's hash is XXH3-64 of its bytes, seeded with the checkpoint's generation, the
file's name and the block's offset there: it fits no other place, file or checkpoint.

    xxh3(block, seed = xxh3("GENERATION/FILE:OFFSET"))       of the manifest: 16 hexadecimal digits

A read is cut into the blocks that it lies in. One that is wanted whole goes straight into the
caller's memory, and is hashed there; one that is wanted in part stays for the next read, until its
end was taken or another one of its section is read. So a section that is read from its front to its
end, in any pieces, is read once.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import xxhash

from offload.checkpoint.format.disk import OpenFile
from offload.checkpoint.format.manifest import Manifest, SectionRecord
from offload.tiers.errors import CheckpointError
from offload.tiers.units import format_bytes

REMEDY = "load another checkpoint, or restore this one from a copy"
BLOCK_NBYTES = 2 << 20  # hashes take 16 digits of each: 64 MB for 8 TB
DIGITS = 16  # of a hash
_AHEAD_NBYTES = 16 << 20
_MAX_OPEN = 4


def block_hash(bound_to: str, offset_bytes: int, data: memoryview | bytes = b"") -> Any:
    """The hash of a block that begins at `offset_bytes` of its file, to be given the bytes after
    `data`."""
    seed = xxhash.xxh3_64_intdigest(f"{bound_to}:{offset_bytes}".encode())
    return xxhash.xxh3_64(data, seed=seed)


class BlockHashes:
    """Hashes of a section whose bytes come piece by piece. `bound_to`: generation and file."""

    def __init__(self, bound_to: str, start_bytes: int) -> None:
        self._bound_to = bound_to
        self._start = start_bytes
        self._nbytes = 0  # that were hashed
        self._digests: list[Any] = []  # of blocks, the last one incomplete

    def update(self, data: memoryview) -> None:
        """Hash the section's next bytes."""
        while data.nbytes:
            if self._nbytes % BLOCK_NBYTES == 0:
                self._digests.append(block_hash(self._bound_to, self._start + self._nbytes))
            part = data[: BLOCK_NBYTES - self._nbytes % BLOCK_NBYTES]
            self._digests[-1].update(part)
            self._nbytes += part.nbytes
            data = data[part.nbytes :]

    def text(self) -> str:
        """All hashes, one after another."""
        return "".join(digest.hexdigest() for digest in self._digests)


@dataclass(frozen=True, slots=True)
class _Block:
    section: str
    start: int  # in the file
    nbytes: int
    xxh3: str


class _File:
    def __init__(self, file: OpenFile, bound_to: str, sections: list[SectionRecord]) -> None:
        self.file = file
        self._bound_to = bound_to
        self._kept: dict[str, tuple[int, memoryview]] = {}  # one block of each section, by its name
        self._sections = [section for section in sections if section.nbytes]
        self._starts = [0, *accumulate(section.nbytes for section in self._sections)]

    def _block(self, index: int, number: int) -> _Block:
        section, first = self._sections[index], number * BLOCK_NBYTES
        nbytes = min(BLOCK_NBYTES, section.nbytes - first)
        digits = slice(number * DIGITS, (number + 1) * DIGITS)
        return _Block(section.name, self._starts[index] + first, nbytes, section.xxh3[digits])

    def sections(self) -> Iterator[Iterator[_Block]]:
        """All blocks, section by section."""
        for index, section in enumerate(self._sections):
            count = -(-section.nbytes // BLOCK_NBYTES)
            yield (self._block(index, number) for number in range(count))

    def fill(self, into: memoryview, block: _Block) -> str | None:
        """Read a whole block. Returns what is wrong with it, or None."""
        self.file.read_ahead(block.start + _AHEAD_NBYTES, block.nbytes)
        self.file.read_all(into, block.start)
        digest = block_hash(self._bound_to, block.start, into).hexdigest()
        if digest == block.xxh3:
            return None
        where = f"{block.section} ({format_bytes(block.nbytes)} at byte {block.start})"
        return f"{self.file.path} is damaged: {where} has XXH3 {digest} instead of {block.xxh3}"

    def read(self, offset_bytes: int, into: memoryview) -> int:
        """Fill the front of `into` with bytes of one block; returns their number."""
        index = bisect_right(self._starts, offset_bytes) - 1
        block = self._block(index, (offset_bytes - self._starts[index]) // BLOCK_NBYTES)
        skipped = offset_bytes - block.start
        count = min(block.nbytes - skipped, into.nbytes)
        if count == block.nbytes:
            self._fill_whole(into[:count], block)
        else:
            into[:count] = self._whole(block)[skipped : skipped + count]
            if skipped + count == block.nbytes:
                del self._kept[block.section]
        return count

    def _whole(self, block: _Block) -> memoryview:
        """The whole block, for a read of a part of it."""
        start, content = self._kept.pop(block.section, (-1, memoryview(b"")))
        if start != block.start:
            if content.nbytes != block.nbytes:  # else its memory is used again
                content = memoryview(bytearray(block.nbytes))
            self._fill_whole(content, block)
        self._kept[block.section] = block.start, content
        return content

    def _fill_whole(self, into: memoryview, block: _Block) -> None:
        problem = self.fill(into, block)
        if problem is not None:
            raise CheckpointError(f"{problem}; {REMEDY}")


class CheckedFiles:
    """Reads a checkpoint's files. `open_file` opens one by its name."""

    def __init__(self, manifest: Manifest, open_file: Callable[[str], OpenFile]) -> None:
        self._manifest = manifest
        self._open_file = open_file
        self._open: OrderedDict[str, _File] = OrderedDict()  # used last at the end

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].file.close()

    def read_into(self, name: str, offset_bytes: int, buffer: memoryview) -> None:
        """Fill `buffer` with a file's bytes from `offset_bytes` on; the file must have them.

        CheckpointError if they, or others of their blocks, are not what was written; StorageError.
        The content of `buffer` is undefined then.
        """
        file = self._file(name)
        buffer = buffer.cast("B")
        done = 0
        while done < buffer.nbytes:
            done += file.read(offset_bytes + done, buffer[done:])

    def _file(self, name: str) -> _File:
        file = self._open.get(name)
        if file is None:
            sections, bound_to = self._manifest.files[name].sections, self._manifest.bound_to(name)
            file = self._open[name] = _File(self._open_file(name), bound_to, sections)
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)[1].file.close()
        self._open.move_to_end(name)
        return file

    def problems(self, name: str, on_bytes: Callable[[int], None]) -> Iterator[str]:
        """The first damaged block of each section of a file, as a message."""
        try:
            file = self._file(name)
        except CheckpointError as error:
            yield str(error)
            return
        buffer = memoryview(bytearray(BLOCK_NBYTES))
        for section in file.sections():
            problem = None
            for block in section:
                problem = problem or file.fill(buffer[: block.nbytes], block)
                on_bytes(block.nbytes)
            if problem is not None:
                yield problem
