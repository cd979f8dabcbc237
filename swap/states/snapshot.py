"""A state's bytes as they are now, for a reader that takes its time.

MemorySnapshot    the home itself: a piece must not be overwritten before it was let go
FileSnapshot      the versions that are at home now: they stay until they are let go, whatever
                  is written meanwhile, and take room beside the new ones
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from offload.swap.io.io_backend import Priority
from offload.swap.threads.transfer import Transfer
from offload.tiers.extent import PAGE_NBYTES
from offload.tiers.units import round_up

if TYPE_CHECKING:
    from offload.swap.io.block_store import BlockStore, StoredBlock
    from offload.swap.states.state import HostPiece


class Snapshot(Protocol):
    """The bytes of a state, piece by piece. Thread-safe. Each piece is let go once."""

    is_versioned: bool  # the state may be overwritten meanwhile

    def host_piece(self, piece: int) -> HostPiece | None:
        """The piece in host memory; None where it has to be read."""
        ...

    def read_piece(self, piece: int, destination: torch.Tensor) -> Transfer[None]:
        """Fill `destination` (host memory, whole pages, at least the piece's bytes)."""
        ...

    def let_go(self, piece: int) -> None:
        """Let go of a piece that is not needed any more. Idempotent."""
        ...


class MemorySnapshot:
    """A snapshot of a home in host memory."""

    is_versioned = False

    def __init__(self, piece_of: Callable[[int], HostPiece]) -> None:
        self._piece_of = piece_of

    def host_piece(self, piece: int) -> HostPiece | None:
        return self._piece_of(piece)

    def read_piece(self, piece: int, destination: torch.Tensor) -> Transfer[None]:
        found = self._piece_of(piece).view
        destination[: found.numel()].copy_(found)
        return Transfer.completed(None)

    def let_go(self, piece: int) -> None:
        """Do nothing: the memory is the home's."""


class FileSnapshot:
    """A snapshot of blocks in a store. Its reads come after those of the model and of updates."""

    is_versioned = True

    def __init__(self, store: BlockStore, blocks: Sequence[StoredBlock]) -> None:
        """The lock must be held, or the blocks might be freed before they are kept."""
        self._store = store
        self._blocks: list[StoredBlock | None] = list(blocks)
        for block in blocks:
            store.keep(block)

    def host_piece(self, piece: int) -> HostPiece | None:
        return None

    def read_piece(self, piece: int, destination: torch.Tensor) -> Transfer[None]:
        block = self._blocks[piece]
        assert block is not None, "not let go yet"
        pages = destination.numpy().data[: round_up(block.nbytes, PAGE_NBYTES)]
        return self._store.read(block, pages, priority=Priority.BACKGROUND)

    def let_go(self, piece: int) -> None:
        block, self._blocks[piece] = self._blocks[piece], None
        if block is not None:
            self._store.let_go(block)
