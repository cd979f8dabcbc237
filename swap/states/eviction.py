"""Which copies leave a tier's memory first: the decisions of a `SlotPool`, apart from its memory.

The copy with the furthest next use is evicted first (Belady, 1966): a training step uses groups in
the order of the step before. Another order is another class like `FurthestNextUse`, and nothing
else: results do not depend on which copies are evicted, only the bytes that move do.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

# A scan of all copies finds one victim, and one more per so many copies. With fewer copies every
# eviction scans anew: a scan is cheap then, and older victims may not be the furthest any more.
_PER_VICTIM = 64


class CachedPiece(Protocol):
    """A piece with a copy in the pool's memory (see `Slot`). Called with the lock held."""

    @property
    def name(self) -> str: ...

    @property
    def held_nbytes(self) -> int: ...

    def next_use(self) -> float:
        """Uses from now until it is needed: below 0 if that is now, infinity if never."""

    def can_evict(self) -> bool: ...

    def evict(self) -> None: ...

    def write_back(self) -> None:
        """Start to write back a dirty copy. Does nothing if it is clean or being written back."""

    def transit(self) -> Callable[[], object] | None:
        """Return a function that waits until this copy's moves end; None if it is not moving."""


class EvictionPolicy(Protocol):
    """Decides which copies of one pool go, and in which order. The pool calls it with its lock
    held, and evicts and writes back what it answers; the policy itself moves nothing."""

    def next_victim(
        self, held: Mapping[int, CachedPiece], before: float | None
    ) -> CachedPiece | None:
        """Return the copy to evict next, which the caller does at once; None if none should go.

        `held` has all copies of the pool by identity, the oldest first. The victim must be one that
        can be evicted, and one that `may_make_room` for what is needed `before`.
        """

    def may_make_room(self, piece: CachedPiece, before: float | None) -> bool:
        """Whether `piece` may go for something that is needed `before` uses from now. None stands
        for a demand, for which everything may go."""

    def write_back_order(self, pieces: Iterable[CachedPiece]) -> Sequence[CachedPiece]:
        """Return copies in the order in which they are written back, if they are dirty, to make
        room."""


class FurthestNextUse:
    """Evicts the copy needed last, and of two that are needed at once the larger one.

    Among many copies (experts, pages of keys and values) not every eviction sorts all of them: one
    scan finds several victims, and the next evictions take those, except a victim that is needed
    sooner by then.
    """

    def __init__(self) -> None:
        self._furthest: list[CachedPiece] = []  # the last scan's victims; the first to go is last
        self._least_use = 0.0  # no victim was needed sooner than this

    def next_victim(
        self, held: Mapping[int, CachedPiece], before: float | None
    ) -> CachedPiece | None:
        piece = self._found_before(held) or self._scan(held)
        if piece is None or self.may_make_room(piece, before):
            return piece
        if len(held) >= _PER_VICTIM:
            self._furthest.append(piece)
        return None

    def may_make_room(self, piece: CachedPiece, before: float | None) -> bool:
        return before is None or piece.next_use() > before

    def write_back_order(self, pieces: Iterable[CachedPiece]) -> Sequence[CachedPiece]:
        return sorted(pieces, key=lambda piece: -piece.next_use())

    def _found_before(self, held: Mapping[int, CachedPiece]) -> CachedPiece | None:
        while self._furthest:
            piece = self._furthest.pop()
            is_held = held.get(id(piece)) is piece
            if is_held and piece.can_evict() and piece.next_use() >= self._least_use:
                return piece
        return None

    def _scan(self, held: Mapping[int, CachedPiece]) -> CachedPiece | None:
        ordered = sorted(
            held.values(), key=lambda each: (-each.next_use(), -each.held_nbytes, each.name)
        )
        victims = (each for each in ordered if each.can_evict())
        furthest = list(itertools.islice(victims, 1 + len(held) // _PER_VICTIM))
        self._furthest = furthest[:0:-1]
        if self._furthest:
            self._least_use = self._furthest[0].next_use()
        return furthest[0] if furthest else None
