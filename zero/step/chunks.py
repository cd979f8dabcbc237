"""A chunk during an update: its bytes of every class of state, and where they are stepped.

A chunk is stepped where its optimizer record lives. The CPU works on bytes in host memory, in place
or staged through a buffer there. The device steps bytes that are at home or mirrored in its memory
in place; others are first fetched to host memory, as for the CPU, and copied to the device and
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch

from offload.kernels.cpu.noise import Noise, noise_of
from offload.kernels.rules import Scalars
from offload.swap.device.streams import StreamEvent
from offload.swap.states.state import HostPiece, State
from offload.swap.threads.transfer import Transfer
from offload.zero.groups.group import ParamGroup
from offload.zero.step.lazy_updates import ZeroUpdates
from offload.zero.step.optimizer_state import Hyper, HyperOf, OptimizerState
from offload.zero.step.records import RecordFormat
from offload.zero.step.undo_codes import Codes


@dataclass(slots=True)
class Segment:
    """Consecutive elements of a rank's part that are updated with the same hyperparameters. It is
    never changed; a frozen dataclass takes five times as long to make."""

    start: int
    stop: int
    scalars: Scalars
    step: int  # number of updates of these elements, this one included
    # Updates before this one, the oldest first, each with a gradient of zeros: its numbers and step
    missed: Sequence[tuple[Scalars, int]] = ()
    has_gradient: bool = True  # False: this one has a gradient of zeros, too

    def runs(self) -> Iterator[Segment]:
        """Yield the same updates, joined where one compiled loop can make them."""
        if not self.missed:
            yield self
            return
        steps = [*self.missed, (self.scalars, self.step)]
        for _, each in groupby(steps, lambda step: step[0].loop):
            *missed, (scalars, step) = each
            graded = self.has_gradient and step == self.step
            yield Segment(self.start, self.stop, scalars, step, missed, graded)


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of an update: the parameters that have a gradient, and each one's numbers."""

    indices: tuple[int, ...] = ()  # of the parameters in their group
    hypers: tuple[Hyper, ...] = ()
    scales: tuple[float, ...] = ()  # what gradients were multiplied with

    @classmethod
    def of(cls, state: OptimizerState, hyper_of: HyperOf, grad_scale: float) -> Terms:
        """Return the terms of a group's next update, if the step scales gradients so."""
        params, gradients = state.group.params, state.gradients
        hypers = {i: hyper_of(params[i]) for i in np.flatnonzero(gradients.passes).tolist()}
        there = {index: hyper for index, hyper in hypers.items() if hyper is not None}
        scales = tuple(grad_scale * gradients.factor(index) for index in there)
        return cls(tuple(there), tuple(there.values()), scales)


@dataclass(slots=True)
class GroupUpdate:
    state: OptimizerState
    segments: Sequence[Segment]
    ready: Transfer[None]
    done: Callable[[], None]  # called after the last chunk: gradients are not read any more
    has_gradients: bool = True  # False: it reads none, and there need not be any
    weight_writes: list[Transfer[None]] = field(default_factory=list)
    begun: bool = False
    chunks_left: int = 0  # once begun: those that are not on their way home
    after: StreamEvent = field(default_factory=StreamEvent)  # the model's stream at `submit`
    codes: Codes | None = None  # of records in host memory, while the step may decide otherwise
    undoes: GroupUpdate | None = None  # is undone first, as far as it was made
    some: Sequence[int] | None = None  # the only chunks to update

    @property
    def group(self) -> ParamGroup:
        return self.state.group

    @property
    def chunks(self) -> Sequence[int]:
        """The numbers of the chunks to update."""
        return range(len(self.state.chunks)) if self.some is None else self.some

    @property
    def can_begin(self) -> bool:
        """Whether the update need not wait for other ranks."""
        return self.state.gradients.is_reduced_locally or not self.has_gradients


def segments_of(state: OptimizerState, terms: Terms, missed: ZeroUpdates) -> list[Segment]:
    """Return the segments of a group's next update, with all that it `missed`, for the parameters
    in this rank's part. Changes nothing."""
    segments, missed = [], dict(missed)
    # most parameters share them; by id, since hashing a Hyper takes longer than all else
    scalars: dict[tuple[int, int, float], Scalars] = {}
    steps = (state.steps[list(terms.indices)] + 1).tolist()
    for index, hyper, scale, step in zip(
        terms.indices, terms.hypers, terms.scales, steps, strict=True
    ):
        part = state.parts.get(index)
        key = (id(hyper), step, scale)
        if key not in scalars:
            scalars[key] = hyper.scalars(step, scale)
        before = missed.pop(index, ())
        if part is not None:
            spec = part.spec
            segments.append(Segment(spec.offset, spec.stop, scalars[key], step, before))
    for index, (*before, (numbers, step)) in missed.items():  # without gradients
        part = state.parts.get(index)
        if part is not None:
            spec = part.spec
            segments.append(
                Segment(spec.offset, spec.stop, numbers, step, before, has_gradient=False)
            )
    segments.sort(key=lambda segment: segment.start)
    return segments if state.group.matrices else _merged(segments)


def _merged(pieces: Sequence[Segment]) -> list[Segment]:
    """Return neighbouring segments with equal numbers as one (fewer, longer kernel calls)."""
    merged: list[Segment] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.stop == piece.start
            and last.step == piece.step
            and (last.scalars is piece.scalars or last.scalars == piece.scalars)
            and (last.has_gradient, last.missed) == (piece.has_gradient, piece.missed)
        ):
            merged[-1] = replace(last, stop=piece.stop)
        else:
            merged.append(piece)
    return merged


@dataclass(slots=True)
class ChunkBytes:
    """One class's bytes of a chunk."""

    home: State
    piece: int
    before: Transfer[None] | None = None  # the bytes in host memory are valid once it is done
    in_place: HostPiece | None = None  # in host memory, where `home` has them
    staged: torch.Tensor | None = None  # in a buffer in host memory
    arrival: Transfer[None] | None = None  # of the staged bytes; None: they are only written
    on_device: torch.Tensor | None = None  # where `home` has them on the device
    copied: torch.Tensor | None = None  # in a buffer on the device

    @property
    def nbytes(self) -> int:
        span = self.home.span(self.piece)
        return int(span.stop - span.start)

    @property
    def needed_on_host(self) -> bool:
        """Whether the bytes pass through host memory. Must be called once `on_device` is known."""
        return self.on_device is None or not self.home.at_home_on_device

    def find_in_host_memory(self) -> None:
        """Set `in_place` if the bytes are in host memory. Waits for bytes that have no copy
        anywhere yet."""
        self.in_place = self.home.host_piece(self.piece)
        if self.in_place is None and self.before is not None and not self.before.done():
            self.before.wait()
            self.in_place = self.home.host_piece(self.piece)

    def wait(self) -> torch.Tensor:
        """Return the bytes in host memory (1D uint8), once they have arrived and nothing reads them
        any more."""
        if self.before is not None:
            self.before.wait()
        if self.in_place is not None:
            return self.in_place.wait()
        assert self.staged is not None, "started as one or the other"
        if self.arrival is not None:
            self.arrival.wait()
        return self.staged

    def device_bytes(self) -> torch.Tensor:
        """Return the bytes on the device (1D uint8), valid in stream order."""
        there = self.on_device if self.on_device is not None else self.copied
        assert there is not None, "there, or copied there"
        return there

    def send_home(self) -> Transfer[None] | None:
        """Start taking the changed bytes home; a transfer only if they were staged."""
        if not self.needed_on_host:
            return None  # they are in their home already
        if self.in_place is not None:
            self.home.mark_piece_dirty(self.piece)
            return None
        assert self.staged is not None, "started as one or the other"
        return self.home.write_piece(self.piece, self.staged)

    def let_go(self) -> None:
        """Drop all views of the home's memory."""
        self.in_place = None
        self.on_device = None


@dataclass(slots=True)
class Chunk:
    """One chunk of one group's update: the same range of elements in every class of state."""

    update: GroupUpdate
    number: int
    record_format: RecordFormat
    weight: ChunkBytes
    record: ChunkBytes
    gradient: ChunkBytes | None  # None: no gradient is read
    buffer: torch.Tensor | None = None  # in host memory, for what is staged

    @property
    def elements(self) -> range:
        return self.update.state.chunks[self.number]

    @property
    def by_device(self) -> bool:
        """Whether the device steps it, because its record is at home there."""
        return self.record.home.at_home_on_device

    @property
    def parts(self) -> tuple[ChunkBytes, ...]:
        both = (self.weight, self.record)
        return both if self.gradient is None else (*both, self.gradient)

    def segments(self, of: Sequence[Segment] | None = None) -> Iterator[tuple[Segment, slice]]:
        """Yield the chunk's segments, or its part `of` others, in elements from its start."""
        for segment in self.update.segments if of is None else of:
            lo = max(segment.start, self.elements.start) - self.elements.start
            hi = min(segment.stop, self.elements.stop) - self.elements.start
            if lo < hi:
                for run in segment.runs():
                    yield run, slice(lo, hi)

    def noise(self, seed: int, step: int, span: slice) -> Noise:
        """Return noise that depends on seed, group, step and place in the group alone."""
        noise = noise_of(seed, self.update.group.index, step)
        first = self.update.state.part.trainable.start
        return noise.at(first + self.elements.start + span.start)
