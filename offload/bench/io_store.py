"""Our way to the disk: blocks in a `BlockStore`, each write to a new extent, checked when read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from offload.swap.io.backends import open_backend
from offload.swap.io.block_store import BlockStore, StoredBlock
from offload.swap.io.swap_file import SwapFile
from offload.swap.threads.transfer import Transfer
from offload.tiers.file_tier import FileTier
from offload.tiers.ledger import Ledger, StateClass

T = TypeVar("T")


class StoreLoop:
    """Writes and reads `blocks` blocks; at most one per part of the buffer is in flight.

    Every pass writes all blocks anew, as a training step does, so each replaces its predecessor
    and the extents move around in the file.
    """

    def __init__(
        self, file: SwapFile, parts: Sequence[memoryview], blocks: int, *, backend: str,
        checksum: bool,
    ) -> None:  # fmt: skip
        """`file` must hold all blocks and one more per part; parts are of one size."""
        self.block_nbytes = parts[0].nbytes
        assert all(part.nbytes == self.block_nbytes for part in parts), "blocks are of one size"
        room = (blocks + len(parts)) * self.block_nbytes
        tier = FileTier(room, [1.0], Ledger())
        mover = open_backend(backend)
        self.backend = mover.name
        self._store = BlockStore([file], tier, mover, checksum=checksum)
        self._parts = parts
        self._stored: list[StoredBlock | None] = [None] * blocks

    @property
    def nbytes(self) -> int:
        return len(self._stored) * self.block_nbytes

    def write(self) -> None:
        """Write every block."""

        def start(index: int, part: memoryview) -> Transfer[StoredBlock]:
            return self._store.write(
                part, owner=f"block {index}", state_class=StateClass.OPTIMIZER,
                replaces=self._stored[index],
            )  # fmt: skip

        for index, block in self._flow(start):
            self._stored[index] = block

    def read(self) -> None:
        """Read every block, after a `write`."""

        def start(index: int, part: memoryview) -> Transfer[None]:
            block = self._stored[index]
            assert block is not None, "written first"
            return self._store.read(block, part)

        for _ in self._flow(start):
            pass

    def _flow(self, start: Callable[[int, memoryview], Transfer[T]]) -> list[tuple[int, T]]:
        flying: deque[tuple[int, Transfer[T]]] = deque()
        ended: list[tuple[int, T]] = []
        for index in range(len(self._stored)):
            if len(flying) == len(self._parts):
                first, transfer = flying.popleft()
                ended.append((first, transfer.wait()))
            flying.append((index, start(index, self._parts[index % len(self._parts)])))
        ended += [(index, transfer.wait()) for index, transfer in flying]
        return ended

    def close(self) -> None:
        """Close store, backend and file."""
        self._store.close()
