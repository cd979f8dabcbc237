"""Hashes of the blocks in which a checkpoint's files are checked.

A section (see `safetensors_file`) is cut into blocks of 2 MiB from its first byte on; its last one
is shorter. A block's hash is XXH3-64 of its bytes, seeded with the checkpoint's generation, the
file's name and the block's offset there: it fits no other place, file or checkpoint.

    xxh3(block, seed = xxh3("GENERATION/FILE:OFFSET"))       of the manifest: 16 hexadecimal digits
"""

from __future__ import annotations

import secrets
from typing import Any

import xxhash

BLOCK_NBYTES = 2 << 20  # hashes take 16 digits of each: 64 MB for 8 TB
DIGITS = 16  # of a hash


def new_generation() -> str:
    """A number that no other save uses."""
    return secrets.token_hex(8)


def blocks_in(nbytes: int) -> int:
    """The number of blocks of a section of `nbytes`."""
    return -(-nbytes // BLOCK_NBYTES)


def seed_of(bound_to: str, offset_bytes: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{bound_to}:{offset_bytes}".encode())


def block_hash(data: memoryview, bound_to: str, offset_bytes: int) -> str:
    """The hash of a whole block that begins at `offset_bytes` of its file."""
    return xxhash.xxh3_64_hexdigest(data, seed_of(bound_to, offset_bytes))


class BlockHashes:
    """Hashes of a section whose bytes come piece by piece. `bound_to`: generation and file."""

    def __init__(self, bound_to: str, start_bytes: int) -> None:
        self._bound_to = bound_to
        self._offset = start_bytes  # of the next block
        self._left = 0  # bytes that the current block lacks
        self._digest: Any = None
        self._done: list[str] = []

    def update(self, data: memoryview) -> None:
        """Hash the section's next bytes."""
        while data.nbytes:
            if not self._left:
                self._begin()
            part = data[: self._left]
            self._digest.update(part)
            self._left -= part.nbytes
            data = data[part.nbytes :]

    def _begin(self) -> None:
        self._finish()
        self._digest = xxhash.xxh3_64(seed=seed_of(self._bound_to, self._offset))
        self._offset += BLOCK_NBYTES
        self._left = BLOCK_NBYTES

    def _finish(self) -> None:
        if self._digest is not None:
            self._done.append(self._digest.hexdigest())
            self._digest = None

    def text(self) -> str:
        """All hashes, one after another. Call it once, at the end."""
        self._finish()
        return "".join(self._done)
