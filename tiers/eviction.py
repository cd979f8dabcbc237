"""The order of evicting cached pieces: the one with the furthest next use first (Belady, 1966).

A training step uses groups in an order learnt from the previous one, so the next use is known and
the optimal policy is possible; evicting the least recently used would hit what a cyclic scan needs
next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

# Added to the next use of a copy that is made in memory from other bytes there (weights from their
# codes): it is given up before any that would have to be moved again.
MADE_HERE = 1e9

T = TypeVar("T", bound="Evictable")


class Evictable(Protocol):
    """A copy in memory of a piece of state with a valid home in another tier."""

    @property
    def name(self) -> str: ...

    @property
    def held_nbytes(self) -> int:
        """Bytes that dropping the copy would free."""
        ...

    def can_drop(self) -> bool:
        """True if the copy is clean and no tensor views it."""
        ...


def furthest_first(pieces: Iterable[T], next_use: Callable[[T], float]) -> Iterator[T]:
    """Pieces that can be dropped, the one needed last first; ties by size, larger first. Each is
    asked whether it can be dropped when its turn comes."""
    ordered = sorted(pieces, key=lambda piece: (-next_use(piece), -piece.held_nbytes, piece.name))
    return (piece for piece in ordered if piece.can_drop())
