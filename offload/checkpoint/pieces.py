"""Pieces of states in host memory, one at a time, from any tier.

Works through the update side of `State`, so nothing is brought, evicted or reordered: a save leaves
every residency as it was, but that of weights in codes, which are decoded group by group. Memory:
one buffer for the largest piece, beyond the engine's budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from offload.swap.coded_state import CodedState
from offload.swap.state import State
from offload.tiers.extent import PAGE_NBYTES
from offload.tiers.host_region import HostRegion
from offload.tiers.units import round_up
from offload.zero.layout import ParamSpec


class PieceAccess:
    """Reads and overwrites whole pieces. For states that are settled."""

    def __init__(self, states: Sequence[State]) -> None:
        sizes = (min(s.piece_nbytes, s.nbytes) for s in states if not isinstance(s, CodedState))
        largest = max(sizes, default=0)
        # page-aligned, as direct I/O wants it, and returned to the system with this object
        size = round_up(max(largest, 1), PAGE_NBYTES)
        self._buffer = HostRegion(size).tensor(0, size)

    @contextmanager
    def reading(self, state: State, piece: int) -> Iterator[torch.Tensor]:
        """The piece's bytes (1D uint8, host memory), valid and unchanged within the block."""
        span = state.span(piece)
        if isinstance(state, CodedState):  # decoded into memory of its own budget
            yield state.host_tensor()[span]
            return
        found = state.host_piece(piece)
        if found is not None:
            yield found.wait()
            return
        staged = self._staged(span)
        state.read_piece(piece, staged).wait()
        yield staged[: span.stop - span.start]

    @contextmanager
    def overwriting(self, state: State, piece: int) -> Iterator[torch.Tensor]:
        """Memory for all of the piece's bytes, which go home after the block (if nothing failed).

        What it holds at first is undefined.
        """
        span = state.span(piece)
        if isinstance(state, CodedState):
            values = state.host_tensor()
            yield values[span]
            state.host_wrote()
            return
        found = state.host_piece(piece)
        if found is not None:
            yield found.wait()
            state.wrote_piece(piece)
            return
        staged = self._staged(span)
        yield staged[: span.stop - span.start]
        state.write_piece(piece, staged).wait()

    def _staged(self, span: slice) -> torch.Tensor:
        return self._buffer[: round_up(span.stop - span.start, PAGE_NBYTES)]


def overlaps(
    specs: Sequence[ParamSpec], elements: range
) -> Iterator[tuple[ParamSpec, slice, slice]]:
    """The parameters in a range of the flat buffer: each with its elements there and its own."""
    for spec in specs:
        lo, hi = max(spec.offset, elements.start), min(spec.stop, elements.stop)
        if lo < hi:
            here = slice(lo - elements.start, hi - elements.start)
            yield spec, here, slice(lo - spec.offset, hi - spec.offset)


def elements_of(state: State, piece: int, itemsize: int) -> range:
    """A piece's range of the flat buffer."""
    span = state.span(piece)
    return range(span.start // itemsize, span.stop // itemsize)
