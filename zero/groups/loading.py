"""A group's first values: parameters as given, optimizer states (if any) empty.

Ranges of the flat buffer are filled one after the other, and a parameter's values are in memory
only while ranges with some of them are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from offload.kernels.bits import array_of, flat_array
from offload.kernels.cpu.convert import encode, split_master
from offload.kernels.floats import Array, Float
from offload.swap.states.state import State
from offload.zero.groups.layout import ParamSpec
from offload.zero.ranks.sharding import Part

if TYPE_CHECKING:
    from offload.zero.step.optimizer_state import OptimizerState

ValuesOf = Callable[[ParamSpec], torch.Tensor]
_PIECE_NUMEL = 1 << 22


def load_weights(state: State, part: Part, own: Float, values: ValuesOf) -> None:
    """Set this rank's part of a group's parameters (from any float dtype), and nothing else."""
    host = array_of(state.host_blank(), own)
    window = _Window(part.layout.params, values)
    _fill(part.trained_in(host), part.trainable, own, window)
    _fill(part.frozen_in(host), part.frozen, own, window)
    del host
    state.mark_host_dirty()


def load_group(state: OptimizerState, own: Float, values: ValuesOf) -> None:
    """Set this rank's part of a group's parameters (from any float dtype), with fresh states."""
    group = state.group
    host = array_of(group.state.host_blank(), own)
    part = state.part
    weights = part.trained_in(host)
    window = _Window(group.layout.params, values)
    for elements, record in zip(state.chunks, state.records, strict=True):
        first = part.trainable.start
        full = window.assemble(range(elements.start + first, elements.stop + first))
        arrays = state.record_format.arrays(record.blank(), len(elements))
        for name in arrays:  # no name for a view: a copy with views is not evicted
            arrays[name][:] = 0
        store_full(full, weights[elements.start : elements.stop], own, arrays)
        del arrays
        record.mark_dirty()
    _fill(part.frozen_in(host), part.frozen, own, window)
    del weights, host
    group.state.mark_host_dirty()


def _fill(into: Array, elements: range, own: Float, window: _Window) -> None:
    for first in elements[::_PIECE_NUMEL]:
        piece = range(first, min(first + _PIECE_NUMEL, elements.stop))
        start = first - elements.start
        encode(window.assemble(piece), into[start : start + len(piece)], own)


class _Window:
    """Parameters' values, for ranges of their flat buffer in ascending order."""

    def __init__(self, params: tuple[ParamSpec, ...], values: ValuesOf) -> None:
        self._params = params
        self._values = values
        self._held: dict[ParamSpec, torch.Tensor] = {}
        for spec in params:
            if not spec.numel:
                values(spec)  # is it there at all?

    def assemble(self, elements: range) -> Array:
        """Return fp32 values of a range of the flat buffer; zero between parameters."""
        full = np.zeros(len(elements), dtype=np.float32)
        for spec in self._params:
            lo, hi = max(spec.offset, elements.start), min(spec.stop, elements.stop)
            if lo < hi:
                if spec not in self._held:
                    self._held[spec] = self._values(spec).detach().reshape(-1)
                piece = self._held[spec][lo - spec.offset : hi - spec.offset]
                full[lo - elements.start : hi - elements.start] = flat_array(piece.float().cpu())
                if hi == spec.stop:
                    del self._held[spec]
        return full


def store_full(full: Array, weights: Array, own: Float, arrays: dict[str, Array]) -> None:
    """Store full-precision values in the weights and, if it has one, the record's master."""
    if "low" in arrays:
        split_master(full, weights, arrays["low"])
        return
    encode(full, weights, own)
    if "master" in arrays:
        arrays["master"][:] = full
