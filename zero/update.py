"""The sharded optimizer's update: groups in order of next use, chunk by chunk, in the background.

    chunk      0        1        2        3
    read    ├──────┤├──────┤├──────┤├──────┤
    compute         ├─┤     ├─┤     ├─┤     ├─┤
    write              ├──────┤├──────┤├──────┤├──────┤

`submit` returns at once: every group's update becomes *pending*, and whoever reads a group waits
for that group's alone, so the optimizer of one step hides behind the next forward. The arithmetic
and its order within each parameter do not depend on when or where a chunk is worked on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from offload.kernels.adam import AdamScalars, adam_step
from offload.kernels.floats import Array, Float, Runner
from offload.swap.state import HostPiece, State
from offload.swap.transfer import Transfer, all_of
from offload.swap.worker import Worker
from offload.tiers.units import round_up
from offload.zero.bits import array_of
from offload.zero.gradients import GradientAccumulator
from offload.zero.group import ParamGroup
from offload.zero.records import RecordFormat

_PAGE_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive elements of a group that are updated with the same numbers."""

    start: int
    stop: int
    scalars: AdamScalars


@dataclass(slots=True)
class OptimizerState:
    """What is kept of one group: a record per chunk of its trainable part."""

    group: ParamGroup
    gradients: GradientAccumulator
    chunks: list[range]
    records: list[State]

    @property
    def in_place(self) -> bool:
        """True if nothing of this group ever moves."""
        states = (self.group.state, self.gradients.state, *self.records)
        return all(state.in_place for state in states)


@dataclass(slots=True)
class GroupUpdate:
    """One group's pending update."""

    state: OptimizerState
    segments: Sequence[Segment]
    ready: Transfer[None]
    done: Callable[[], None]  # after the last chunk: gradients are not read any more
    weight_writes: list[Transfer[None]] = field(default_factory=list)
    begun: bool = False

    @property
    def group(self) -> ParamGroup:
        return self.state.group


@dataclass(slots=True)
class _Part:
    """One class's bytes of a chunk: in place, or staged in a buffer."""

    home: State
    piece: int
    in_place: HostPiece | None = None
    staged: torch.Tensor | None = None
    arrival: Transfer[None] | None = None

    def wait(self) -> torch.Tensor:
        if self.in_place is not None:
            return self.in_place.wait()
        assert self.arrival is not None, "started as one or the other"
        assert self.staged is not None, "started as one or the other"
        self.arrival.wait()
        return self.staged

    def send_home(self) -> Transfer[None] | None:
        """Start taking the changed bytes home; a transfer only if they were staged."""
        if self.in_place is not None:
            self.home.wrote_piece(self.piece)
            return None
        assert self.staged is not None, "started as one or the other"
        return self.home.write_piece(self.piece, self.staged)


@dataclass(slots=True)
class _Chunk:
    update: GroupUpdate
    elements: range
    weight: _Part
    record: _Part
    gradient: _Part
    buffer: torch.Tensor | None
    last: bool


class UpdateQueue:
    """Runs pending updates on a thread of its own. `buffers` are its staging memory (1D uint8)."""

    def __init__(
        self, record_format: RecordFormat, own: Float, run: Runner,
        buffers: Sequence[torch.Tensor], next_use: Callable[[ParamGroup], float],
    ) -> None:  # fmt: skip
        self._format = record_format
        self._own = own
        self._run = run
        self._free = deque(buffers)
        self._staging = bool(buffers)  # False: every home is memory, nothing is ever staged
        self._lookahead = max(2, len(buffers) - 1)
        self._next_use = next_use
        self._waiting: deque[GroupUpdate] = deque()
        self._unfinished: dict[int, GroupUpdate] = {}
        self._lock = threading.Lock()
        self._chunks: Iterator[_Chunk] | None = None
        self._active: deque[_Chunk] = deque()
        self._leaving: deque[tuple[torch.Tensor | None, Transfer[list[None]]]] = deque()
        self._worker = Worker("offload-update", self._work, self._fail)

    # ---------------------------------------------------------------- for the model's thread
    def submit(self, updates: Sequence[GroupUpdate]) -> None:
        """Queue updates in order of next use; each one's `ready` fires when it can be read."""
        with self._lock:
            self._raise_failure()  # nobody would ever end what is submitted to a dead thread
            for update in updates:
                update.group.pending = update.ready
                self._unfinished[update.group.index] = update
                self._waiting.append(update)
        self._worker.wake()

    def promote(self, group: ParamGroup) -> None:
        """`group` is needed now: its update is the next to begin."""
        with self._lock:
            for update in self._waiting:
                if update.group is group:
                    self._waiting.remove(update)
                    self._waiting.appendleft(update)
                    return

    def is_pending(self, group: ParamGroup) -> bool:
        return group.index in self._unfinished

    def settle(self) -> None:
        """Wait until nothing is pending and every byte is home; raises what went wrong."""
        while True:
            with self._lock:
                update = next(iter(self._unfinished.values()), None)
            if update is None:
                break
            update.ready.wait()
        self._raise_failure()

    def await_progress(self) -> bool:
        """Wait for the group being updated, which holds views of copies; False if none is."""
        with self._lock:
            update = next((u for u in self._unfinished.values() if u.begun), None)
        if update is None or threading.current_thread().name == "offload-update":
            return False
        update.ready.wait()
        return True

    def close(self) -> None:
        self._worker.close()

    def _raise_failure(self) -> None:
        if self._worker.failure is not None:
            raise self._worker.failure

    # ---------------------------------------------------------------- on the update thread
    def _work(self) -> bool:
        """One round: keep reads ahead, compute one chunk, or wait for a write."""
        self._reclaim(block=False)
        while len(self._active) < self._lookahead:
            chunk = self._next_chunk()
            if chunk is None:
                break
            self._active.append(chunk)
        if self._active:
            self._compute(self._active.popleft())
            return True
        return self._reclaim(block=True)

    def _reclaim(self, *, block: bool) -> bool:
        """Take back buffers whose writes are done; with `block`, wait for the oldest."""
        reclaimed = False
        while self._leaving and (self._leaving[0][1].done() or (block and not reclaimed)):
            buffer, writes = self._leaving.popleft()
            writes.wait()
            if buffer is not None:
                self._free.append(buffer)
            reclaimed = True
        return reclaimed

    def _next_chunk(self) -> _Chunk | None:
        """Start the reads of the next chunk; None if there is none, or no buffer for it."""
        no_buffer = self._staging and not self._free
        if no_buffer and (self._active or not self._reclaim(block=True)):
            return None
        while True:
            if self._chunks is None:
                update = self._begin_group()
                if update is None:
                    return None
                self._chunks = self._start_chunks(update)
            chunk = next(self._chunks, None)
            if chunk is not None:
                return chunk
            self._chunks = None

    def _begin_group(self) -> GroupUpdate | None:
        with self._lock:
            if not self._waiting:
                return None
            update = self._waiting.popleft()
            update.begun = True
        return update

    def _start_chunks(self, update: GroupUpdate) -> Iterator[_Chunk]:
        state = update.state
        group = update.group
        # The forward is next: let the weights be updated where it will read them, if there is room.
        group.state.bring_host(next_use=self._next_use(group))
        for index, (elements, record) in enumerate(zip(state.chunks, state.records, strict=True)):
            parts = [
                _Part(group.state, index), _Part(record, 0), _Part(state.gradients.state, index),
            ]  # fmt: skip
            buffer = self._stage(parts)
            weight, kept, gradient = parts
            last = index == len(state.chunks) - 1
            yield _Chunk(update, elements, weight, kept, gradient, buffer, last)

    def _stage(self, parts: Sequence[_Part]) -> torch.Tensor | None:
        """Find each part in memory, or start reading it into a buffer; returns the buffer used."""
        buffer: torch.Tensor | None = None
        offset = 0
        for part in parts:
            part.in_place = part.home.host_piece(part.piece)
            if part.in_place is not None:
                continue
            if buffer is None:
                buffer = self._free.popleft()
            span = part.home.span(part.piece)
            end = offset + round_up(span.stop - span.start, _PAGE_NBYTES)
            part.staged = buffer[offset:end]
            part.arrival = part.home.read_piece(part.piece, part.staged)
            offset = end
        return buffer

    def _compute(self, chunk: _Chunk) -> None:
        weight, record = chunk.weight.wait(), chunk.record.wait()
        gradient = chunk.gradient.wait()
        update = chunk.update
        numel = len(chunk.elements)
        grad_format = update.state.gradients.format
        weights = array_of(weight[: numel * self._own.nbytes], self._own)
        grads = array_of(gradient[: numel * grad_format.nbytes], grad_format)
        arrays = self._format.arrays(record, numel)
        for segment in update.segments:
            lo = max(segment.start, chunk.elements.start) - chunk.elements.start
            hi = min(segment.stop, chunk.elements.stop) - chunk.elements.start
            if lo < hi:
                self._step(weights, grads, grad_format, arrays, slice(lo, hi), segment.scalars)
        del weight, record, gradient, weights, grads, arrays
        self._send_home(chunk)

    def _step(
        self, weights: Array, grads: Array, grad_format: Float, arrays: dict[str, Array],
        span: slice, scalars: AdamScalars,
    ) -> None:  # fmt: skip
        optional = {name: arrays[name][span] for name in arrays if name not in _MOMENTS}
        adam_step(
            grads[span], weights[span], arrays["exp_avg"][span], arrays["exp_avg_sq"][span],
            scalars, grad_float=grad_format, weight_float=self._own, run=self._run, **optional,
        )  # fmt: skip

    def _send_home(self, chunk: _Chunk) -> None:
        update = chunk.update
        weight_write = chunk.weight.send_home()
        record_write = chunk.record.send_home()
        if weight_write is not None:
            update.weight_writes.append(weight_write)
        writes = [write for write in (weight_write, record_write) if write is not None]
        if writes or chunk.buffer is not None:
            self._leaving.append((chunk.buffer, all_of(writes)))
        chunk.weight.in_place = chunk.record.in_place = chunk.gradient.in_place = None
        if chunk.last:
            self._finish(update)

    def _finish(self, update: GroupUpdate) -> None:
        update.done()
        writes = all_of(update.weight_writes)
        writes.then(lambda written: self._announce(update, written))

    def _announce(self, update: GroupUpdate, written: Transfer[list[None]]) -> None:
        with self._lock:
            self._unfinished.pop(update.group.index, None)
        if written.failure is not None:
            update.ready.spread(written.failure)
        else:
            update.ready.complete(None)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            updates = list(self._unfinished.values())
            self._unfinished.clear()
        for update in updates:
            if not update.ready.done():
                update.ready.fail(error)


_MOMENTS = ("exp_avg", "exp_avg_sq")


def merge(pieces: Sequence[Segment]) -> list[Segment]:
    """Neighbouring segments with equal numbers as one (fewer, longer kernel calls)."""
    merged: list[Segment] = []
    for piece in sorted(pieces, key=lambda segment: segment.start):
        last = merged[-1] if merged else None
        if last is not None and last.stop == piece.start and last.scalars == piece.scalars:
            merged[-1] = Segment(last.start, piece.stop, last.scalars)
        else:
            merged.append(piece)
    return merged
