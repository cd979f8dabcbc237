"""Pieces of a state at home in a file: each in an extent of its own, with its versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.swap.io.block_store import BlockStore, StoredBlock
from offload.swap.io.io_backend import Priority
from offload.swap.states.state import HostPiece
from offload.swap.threads.transfer import Failure, Transfer
from offload.tiers.errors import StateError, TierFullError
from offload.tiers.ledger import StateClass
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import round_up


class VersionedFile:
    """`pieces` pieces in a `BlockStore`. A write makes a new version of a piece, which is the
    piece once it is complete; the version before is dropped then, or kept while an update is
    speculative. The store's lock must be held in all calls but those that say otherwise."""

    def __init__(self, name: str, pieces: int, state_class: StateClass, store: BlockStore) -> None:
        self.name = name
        self.writes: dict[int, Transfer[Any]] = {}  # of pieces on their way, without those done
        self.failure: Failure | None = None  # of a write
        self._class = state_class
        self._store = store
        self._blocks: list[StoredBlock | None] = [None] * pieces
        self._old: dict[int, StoredBlock] | None = None  # of pieces written since `keep_old`

    def raise_failure(self) -> None:
        """Raise the error of a write that failed. Does not need the lock."""
        if self.failure is not None:
            raise self.failure.again()

    def await_room(self) -> bool:
        """Wait as `BlockStore.await_room` does; needs no lock."""
        return self._store.await_room()

    def is_whole(self) -> bool:
        """Whether every piece was written. Does not need the lock."""
        return None not in self._blocks

    def read(self, piece: int, pages: memoryview, priority: Priority) -> Transfer[None]:
        """Start to fill `pages`, the whole pages of a piece. StateError if it was never written."""
        block = self._blocks[piece]
        if block is None:
            raise StateError(f"{self.name}: piece {piece} is read before it was ever written")
        return self._store.read(block, pages, priority=priority)

    def write(self, piece: int, pages: memoryview) -> Transfer[None]:
        """Write a piece to a new extent; its table entry changes when the write is complete (of
        gradients, whose old version is no undo record, before that).

        Where the tier is full of versions that other writes are replacing, waits for those,
        without the lock.
        """
        arrived = self._write(piece, pages)
        if not arrived.done():  # `_commit` needs the lock held here, unless it ran in this thread
            self.writes[piece] = arrived
        arrived.then(self._note_failure)
        return arrived

    def _write(self, piece: int, pages: memoryview) -> Transfer[Any]:
        before = self._blocks[piece]
        if before is not None and self._class is StateClass.GRADIENTS:
            self._blocks[piece] = None  # an old sum is never gone back to
            self._store.free(before)
        old = self._old
        replaces = self._blocks[piece] if old is None else None
        while True:
            try:
                return self._store.write(
                    pages, owner=self.name, state_class=self._class, replaces=replaces,
                    priority=Priority.BACKGROUND,
                    committed=lambda block: self._commit(piece, block, old),
                )  # fmt: skip
            except TierFullError:
                if not self._store.await_room():
                    raise

    def _commit(self, piece: int, block: StoredBlock, old: dict[int, StoredBlock] | None) -> None:
        """The write is complete (lock held). `old` is where the version before goes, if that step
        is not decided yet; without one the store has freed it."""
        before, self._blocks[piece] = self._blocks[piece], block
        if old is not None and before is not None:
            if old is self._old and piece not in old:
                old[piece] = before
            else:
                self._store.free(before)
        self.writes.pop(piece, None)

    def _note_failure(self, arrived: Transfer[None]) -> None:
        if arrived.failure is not None:
            self.failure = arrived.failure

    def keep_old(self) -> None:
        """Keep the version before of every piece that is written from here on."""
        self._old = {}

    def drop_old(self) -> None:
        """Drop the versions that were kept; writes on their way drop theirs when they end."""
        old, self._old = self._old, None
        for block in (old or {}).values():
            self._store.free(block)

    def go_back(self) -> list[int]:
        """Return to the kept versions; returns the changed pieces. No write may be on its way."""
        old, self._old = self._old or {}, None
        for piece, block in old.items():
            written, self._blocks[piece] = self._blocks[piece], block
            assert written is not None, "it has an old version"
            self._store.free(written)
        return list(old)

    def snapshot(self) -> FileSnapshot:
        """A snapshot of the pieces as they are. StateError if one was never written."""
        blocks = [block for block in self._blocks if block is not None]
        if len(blocks) < len(self._blocks):
            raise StateError(f"{self.name} is saved before it was ever written")
        return FileSnapshot(self._store, blocks)

    def free(self) -> None:
        for block in self._blocks:
            if block is not None:
                self._store.free(block)
        self._blocks = [None] * len(self._blocks)
        self.drop_old()


class FileSnapshot:
    """A snapshot of blocks in a store. These versions stay until they are let go, whatever is
    written meanwhile, and take room beside the new ones. Its reads come after those of the model
    and of updates."""

    is_versioned = True

    def __init__(self, store: BlockStore, blocks: Sequence[StoredBlock]) -> None:
        """The lock must be held, or the blocks might be freed before they are kept."""
        self._store = store
        self._blocks: list[StoredBlock | None] = list(blocks)
        for block in blocks:
            store.keep(block)

    def read(self, piece: int, pages: torch.Tensor) -> HostPiece:
        block = self._blocks[piece]
        assert block is not None, "not let go yet"
        destination = pages.numpy().data[: round_up(block.nbytes, PAGE_NBYTES)]
        reading = self._store.read(block, destination, priority=Priority.BACKGROUND)
        return HostPiece(pages, (reading,))

    def let_go(self, piece: int) -> None:
        block, self._blocks[piece] = self._blocks[piece], None
        if block is not None:
            self._store.let_go(block)
