"""The optimizer states of one chunk: one contiguous record, which moves in one transfer.

    ├ exp_avg ┤├ exp_avg_sq ┤├ remainder int16, or master fp32 ┤├ scales of 8-bit states ┤

Which states there are is the optimizer's, how they are kept is a `StateFormat`. Each array is
shifted by some cache lines more than the one before: arrays a power of two apart compete for the
same cache sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from offload.kernels.cpu.undo_code import can_undo
from offload.kernels.floats import Array, Float
from offload.kernels.rules import (
    BLOCK,
    SCALE_SUFFIX,
    AdamScalars,
    MuonScalars,
    Rule,
    Scalars,
    SgdScalars,
    StateFormat,
    is_signed,
)
from offload.kernels.variants import Master, Variant
from offload.tiers.units import round_up

if TYPE_CHECKING:
    import torch

STAGGER_NBYTES = 17 * 64
ALIGN_NBYTES = 512  # of arrays that share a staging buffer on a device
_STATE_DTYPES: dict[StateFormat, np.dtype[Any]] = {
    StateFormat.FP32: np.dtype(np.float32),
    StateFormat.BF16: np.dtype(np.uint16),
    StateFormat.INT8: np.dtype(np.uint8),
}
_MASTERS = ("low", "master")


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a record: an element per parameter, or per `block` of them."""

    name: str
    dtype: np.dtype[Any]
    block: int = 1

    def numel(self, numel: int) -> int:
        return -(-numel // self.block)

    def span(self, elements: slice) -> slice:
        """Return the array's range for a range of parameters that begins at a block boundary."""
        return slice(elements.start // self.block, self.numel(elements.stop))


A = TypeVar("A", Array, "torch.Tensor")


@dataclass(slots=True)
class Operands(Generic[A]):
    """The arrays that a kernel steps beside weights and gradients; empty or None where there are
    none."""

    states: list[A]
    scales: list[A]  # of 8-bit states
    low: A | None
    master: A | None


@dataclass(frozen=True)
class RecordFormat:
    """The arrays of a record. A record holds a chunk's moments and its master (or remainder)."""

    master: Master
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")  # in the order in which kernels take them
    state_format: StateFormat = StateFormat.FP32

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        fields = [Field(name, _STATE_DTYPES[self.state_format]) for name in self.states]
        if self.master is Master.SPLIT:
            fields.append(Field("low", np.dtype(np.int16)))
        if self.master is Master.FP32:
            fields.append(Field("master", np.dtype(np.float32)))
        if self.state_format is StateFormat.INT8:
            fields += [Field(_scale(n), np.dtype(np.float32), BLOCK) for n in self.states]
        return tuple(fields)

    def of(self, *, matrices: bool) -> RecordFormat:
        """Return the format of a group's records, of `matrices` that Muon trains or of others."""
        return replace(self, states=MuonScalars.states) if matrices else self

    def offsets(self, numel: int) -> list[int]:
        offsets, end = [], 0
        for index, field in enumerate(self.fields):
            start = round_up(end, 64) + (STAGGER_NBYTES if index else 0)
            offsets.append(start)
            end = start + field.numel(numel) * field.dtype.itemsize
        return [*offsets, max(end, 64)]  # an optimizer without states has records all the same

    def nbytes(self, numel: int) -> int:
        return self.offsets(numel)[-1]

    def arrays(self, record: torch.Tensor, numel: int) -> dict[str, Array]:
        """Return views of a record (1D uint8 host memory), each as long as its field says."""
        buffer = record.numpy()
        return {field.name: buffer[span].view(field.dtype) for field, span in self.spans(numel)}

    def spans(self, numel: int) -> Iterator[tuple[Field, slice]]:
        """Yield each field and its bytes in a record of `numel` elements."""
        for field, start in zip(self.fields, self.offsets(numel)[:-1], strict=True):
            yield field, slice(start, start + field.numel(numel) * field.dtype.itemsize)

    def operands(self, arrays: Mapping[str, A], span: slice, scalars: Scalars) -> Operands[A]:
        """Return a kernel's operands from a record (from its arrays, or tensors on the device) to
        step a range of parameters that begins at a block boundary."""
        own = {name: arrays[name][place] for name, place in self.field_spans(span).items()}
        without = not scalars.states or (isinstance(scalars, SgdScalars) and not scalars.momentum)
        names = () if without else self.states
        scaled = names if self.state_format is StateFormat.INT8 else ()
        return Operands(
            [own[name] for name in names], [own[_scale(name)] for name in scaled],
            own.get("low"), own.get("master"),
        )  # fmt: skip

    def field_spans(self, elements: slice) -> dict[str, slice]:
        """Return each array's range for a range of parameters that begins at a block boundary."""
        return {field.name: field.span(elements) for field in self.fields}

    def can_undo(self, weight: Float) -> bool:
        """Return whether the CPU's updates of such records and weights can be undone by a code."""
        count = len(self.states)
        kind = Variant(Rule.ADAM, True, None, weight, self.master, self.state_format, count)
        return self.states == AdamScalars.states[:2] and can_undo(kind)

    def in_format(self, arrays: dict[str, Array], other: RecordFormat) -> dict[str, Array]:
        """Return the arrays as `other` keeps them (itself, or one with fp32 states)."""
        if other == self:
            return arrays
        assert other.state_format is StateFormat.FP32, "formats are mixed in fp32"
        rest = {name: array for name, array in arrays.items() if name in _MASTERS}
        whole = slice(0, max((len(array) for array in arrays.values()), default=0))
        return {name: self.read_state(arrays, name, whole) for name in self.states} | rest

    def take_over(self, arrays: dict[str, Array], given: dict[str, Array]) -> None:
        """The reverse of `in_format`: overwrite `arrays` from its result."""
        for name, values in given.items():
            if name in self.states:
                self.write_state(arrays, name, slice(0, len(values)), values)
            else:
                arrays[name][:] = values

    def read_state(self, arrays: dict[str, Array], name: str, span: slice) -> Array:
        """Return a copy of part of a state in fp32."""
        # imported where values are looked at: counting bytes needs no compiler
        from offload.kernels.cpu.state_codec import decode_state

        stored = self._stored(arrays, name, span)
        return decode_state(*stored, self.state_format, signed=is_signed(name))

    def write_state(self, arrays: dict[str, Array], name: str, span: slice, values: Array) -> None:
        """Overwrite part of a state; what `read_state` gave is kept exactly."""
        from offload.kernels.cpu.state_codec import encode_state

        stored = self._stored(arrays, name, span)
        encode_state(values, *stored, self.state_format, signed=is_signed(name))

    def _stored(
        self, arrays: dict[str, Array], name: str, span: slice
    ) -> tuple[Array, Array | None]:
        """Return part of a state as it is kept, and the scales of 8-bit states."""
        if self.state_format is not StateFormat.INT8:
            return arrays[name][span], None
        return arrays[name][span], arrays[_scale(name)][self.field_spans(span)[_scale(name)]]


def _scale(name: str) -> str:
    return name + SCALE_SUFFIX
