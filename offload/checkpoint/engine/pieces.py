"""Pieces of states in host memory, one at a time, from any tier.

Works through the update side of `State`, so no copy is fetched, evicted or reordered: a save leaves
every residency as it was, except that weights stored in codes are decoded group by group. It takes
memory beyond the engine's budgets: a buffer for the largest piece, or a few small ones for pieces
that are read ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from offload.swap.states.coded_state import CodedState
from offload.swap.states.state import HostPiece, Snapshot, State
from offload.swap.threads.transfer import Transfer
from offload.tiers.host_region import HostRegion
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import round_up

_BUFFERS = 3  # for one piece that is used, and for two that are read meanwhile
_BUFFERS_NBYTES = 96 << 20  # of all of them, if they are more than one


@dataclass(slots=True)
class _Read:
    """A piece that is being read, or is in host memory already."""

    state: State
    piece: int
    found: HostPiece | None = None
    buffer: torch.Tensor | None = None
    arrival: Transfer[None] | None = None

    def wait(self) -> torch.Tensor:
        """The piece's bytes, once they have arrived."""
        if self.found is not None:
            return self.found.wait()
        assert self.buffer is not None, "begun"
        assert self.arrival is not None, "begun"
        self.arrival.wait()
        span = self.state.span(self.piece)
        return self.buffer[: span.stop - span.start]


class PieceAccess:
    """Reads and overwrites whole pieces. For states that are settled."""

    def __init__(
        self, states: Sequence[State], snapshots: Mapping[State, Snapshot] | None = None
    ) -> None:  # fmt: skip
        """States with a snapshot are read from it, and each piece is let go afterwards."""
        self._snapshots = snapshots or {}
        plain = [state for state in states if not isinstance(state, CodedState)]
        self._all_plain = len(plain) == len(states)
        largest = max((min(state.piece_nbytes, state.nbytes) for state in plain), default=0)
        # page-aligned, as direct I/O wants it, and returned to the system with this object
        self._size = round_up(max(1, largest), PAGE_NBYTES)
        self._free = [self._buffer()]
        self._order: Iterator[tuple[State, int]] = iter(())
        self._ahead: deque[_Read] = deque()  # in their order
        self._most_ahead = 0

    def _buffer(self) -> torch.Tensor:
        return HostRegion(self._size).tensor(0, self._size)

    def expect(self, order: Iterable[tuple[State, int]]) -> None:
        """Set the order in which pieces are read next, each once: they are read ahead. No piece may
        be overwritten meanwhile.

        Does nothing where weights are decoded: their slots may need the memory of pieces found.
        """
        if not self._all_plain:
            return
        self._order = iter(order)
        self._most_ahead = max(0, min(_BUFFERS, _BUFFERS_NBYTES // self._size) - 1)
        while len(self._free) + len(self._ahead) <= self._most_ahead:
            self._free.append(self._buffer())

    @contextmanager
    def reading(self, state: State, piece: int) -> Iterator[torch.Tensor]:
        """The piece's bytes (1D uint8, host memory), valid and unchanged within the block."""
        if isinstance(state, CodedState):  # decoded into memory of its own budget
            yield state.host_tensor()[state.span(piece)]
            return
        read = self._take(state, piece)
        try:
            self._read_ahead()
            yield read.wait()
        finally:
            self._give_back(read)

    def _take(self, state: State, piece: int) -> _Read:
        if self._ahead:
            read = self._ahead.popleft()
            assert (read.state, read.piece) == (state, piece), "pieces come as they are expected"
            return read
        next(self._order, None)  # this one
        return self._begin(state, piece)

    def _read_ahead(self) -> None:
        """Begin to read the next pieces, as far as there are buffers."""
        while self._free and len(self._ahead) < self._most_ahead:
            following = next(self._order, None)
            if following is None:
                return
            self._ahead.append(self._begin(*following))

    def _begin(self, state: State, piece: int) -> _Read:
        source = self._snapshots.get(state, state)
        found = source.host_piece(piece)
        if found is not None:
            return _Read(state, piece, found)
        buffer = self._free.pop()
        arrival = source.read_piece(piece, _pages(buffer, state.span(piece)))
        return _Read(state, piece, None, buffer, arrival)

    def _give_back(self, read: _Read) -> None:
        if read.buffer is not None:
            self._free.append(read.buffer)
        read.found = read.buffer = None  # a view of a slot would keep it
        snapshot = self._snapshots.get(read.state)
        if snapshot is not None:
            snapshot.let_go(read.piece)

    @contextmanager
    def overwriting(self, state: State, piece: int) -> Iterator[torch.Tensor]:
        """Yield memory for all of the piece's bytes, its content undefined; they are written to the
        home after the block, unless it raises."""
        span = state.span(piece)
        if isinstance(state, CodedState):
            values = state.host_tensor()
            yield values[span]
            state.mark_host_dirty()
            return
        found = state.host_piece(piece)
        if found is not None:
            yield found.wait()
            state.mark_piece_dirty(piece)
            return
        buffer = self._free[0]
        yield buffer[: span.stop - span.start]
        state.write_piece(piece, _pages(buffer, span)).wait()


def _pages(buffer: torch.Tensor, span: slice) -> torch.Tensor:
    return buffer[: round_up(span.stop - span.start, PAGE_NBYTES)]


def pieces_of(states: Iterable[State]) -> Iterator[tuple[State, int]]:
    """All pieces of some states, one after another."""
    return ((state, piece) for state in states if state.nbytes for piece in range(state.pieces))


def elements_of(state: State, piece: int, itemsize: int) -> range:
    """A piece's range of the flat buffer."""
    span = state.span(piece)
    return range(span.start // itemsize, span.stop // itemsize)
