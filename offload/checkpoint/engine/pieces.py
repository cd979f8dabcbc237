"""Pieces of states in host memory, one at a time, from any tier.

Works through the update side of `State`, so no copy is fetched, evicted or reordered: a save leaves
every residency as it was, except that weights stored in codes are decoded group by group. It takes
memory beyond the engine's budgets: a buffer for the largest piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from offload.swap.states.coded_state import CodedState
from offload.swap.states.state import Snapshot, State
from offload.tiers.host_region import HostRegion
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import round_up


class PieceAccess:
    """Reads and overwrites whole pieces. For states that are settled."""

    def __init__(
        self, states: Sequence[State], snapshots: Mapping[State, Snapshot] | None = None
    ) -> None:  # fmt: skip
        """States with a snapshot are read from it, and each piece is let go afterwards."""
        self._snapshots = snapshots or {}
        plain = [state for state in states if not isinstance(state, CodedState)]
        largest = max((min(state.piece_nbytes, state.nbytes) for state in plain), default=0)
        # page-aligned, as direct I/O wants it, and returned to the system with this object
        size = round_up(max(1, largest), PAGE_NBYTES)
        self._buffer = HostRegion(size).tensor(0, size)

    @contextmanager
    def reading(self, state: State, piece: int) -> Iterator[torch.Tensor]:
        """The piece's bytes (1D uint8, host memory), valid and unchanged within the block."""
        if isinstance(state, CodedState):  # decoded into memory of its own budget
            yield state.host_tensor()[state.span(piece)]
            return
        snapshot = self._snapshots.get(state)
        source = state if snapshot is None else snapshot
        found = source.host_piece(piece)
        if found is not None:
            yield found.wait()
            found = None  # a view of a slot would keep it
        else:
            span = state.span(piece)
            source.read_piece(piece, _pages(self._buffer, span)).wait()
            yield self._buffer[: span.stop - span.start]
        if snapshot is not None:
            snapshot.let_go(piece)

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
        yield self._buffer[: span.stop - span.start]
        state.write_piece(piece, _pages(self._buffer, span)).wait()


def _pages(buffer: torch.Tensor, span: slice) -> torch.Tensor:
    return buffer[: round_up(span.stop - span.start, PAGE_NBYTES)]


def elements_of(state: State, piece: int, itemsize: int) -> range:
    """A piece's range of the flat buffer."""
    span = state.span(piece)
    return range(span.start // itemsize, span.stop // itemsize)
