"""A group's first values: parameters as given, optimizer states (if any) empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from offload.kernels.convert import encode, split_master
from offload.kernels.floats import Array, Float
from offload.swap.state import State
from offload.zero.bits import array_of, flat_array
from offload.zero.layout import ParamSpec
from offload.zero.sharding import Part

if TYPE_CHECKING:
    from offload.zero.optimizer_state import OptimizerState

ValuesOf = Callable[[ParamSpec], torch.Tensor]


def load_weights(state: State, part: Part, own: Float, values: ValuesOf) -> None:
    """Set this rank's part of a group's parameters (from any float dtype), and nothing else."""
    host = array_of(state.host_blank(), own)
    cached = {spec: values(spec) for spec in part.layout.params}
    encode(_assemble(part.trainable, cached), part.trained_in(host), own)
    encode(_assemble(part.frozen, cached), part.frozen_in(host), own)
    del host
    state.host_wrote()


def load_group(state: OptimizerState, own: Float, values: ValuesOf) -> None:
    """Set this rank's part of a group's parameters (from any float dtype), with fresh optimizer
    states."""
    group = state.group
    host = array_of(group.state.host_blank(), own)
    part = state.part
    weights = part.trained_in(host)
    cached = {spec: values(spec) for spec in group.layout.params}
    for elements, record, kept in zip(state.chunks, state.records, state.formats, strict=True):
        full = _assemble(_shifted(elements, part.trainable.start), cached)
        arrays = kept.arrays(record.blank(), len(elements))
        _clear(arrays)
        _store(full, weights[elements.start : elements.stop], own, arrays)
        del arrays
        record.wrote()
    encode(_assemble(part.frozen, cached), part.frozen_in(host), own)
    del weights, host
    group.state.host_wrote()


def _shifted(elements: range, by: int) -> range:
    return range(elements.start + by, elements.stop + by)


def _clear(arrays: dict[str, Array]) -> None:
    for array in arrays.values():
        array[:] = 0


def _assemble(elements: range, values: dict[ParamSpec, torch.Tensor]) -> Array:
    """fp32 values of a range of the flat buffer; zero between parameters."""
    full = np.zeros(len(elements), dtype=np.float32)
    for spec, value in values.items():
        lo, hi = max(spec.offset, elements.start), min(spec.stop, elements.stop)
        if lo < hi:
            piece = value.detach().reshape(-1)[lo - spec.offset : hi - spec.offset]
            full[lo - elements.start : hi - elements.start] = flat_array(piece.float().cpu())
    return full


def _store(full: Array, weights: Array, own: Float, arrays: dict[str, Array]) -> None:
    """Full-precision values into the weights and, if it has one, the record's master."""
    if "low" in arrays:
        split_master(full, weights, arrays["low"])
        return
    encode(full, weights, own)
    if "master" in arrays:
        arrays["master"][:] = full
