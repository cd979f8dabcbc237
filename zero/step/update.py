"""The sharded optimizer's update: groups in order of next use, chunk by chunk, in the background.

    chunk      0        1        2        3
    read    ├──────┤├──────┤├──────┤├──────┤
    compute         ├─┤     ├─┤     ├─┤     ├─┤
    write              ├──────┤├──────┤├──────┤├──────┤

`submit` returns at once: every group's update becomes *pending*, and a reader of a group waits
for that group's alone, so the optimizer of one step hides behind the next forward. Chunks whose
records are at home on the device are queued there in their turn, and this thread goes on with the
CPU's. The arithmetic and its order within each parameter do not depend on when or where a chunk is
worked on.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from offload.kernels.bits import array_of
from offload.kernels.cpu.optimizer import Missed, optimizer_step
from offload.kernels.floats import Array, Float
from offload.kernels.rules import StateFormat
from offload.swap.device.streams import mark_here
from offload.swap.states.fetching import Fetcher, PendingUpdates
from offload.swap.states.trace import Trace
from offload.swap.threads.lanes import Lane, WaitFor, profiled
from offload.swap.threads.save_gate import SaveGate
from offload.swap.threads.transfer import Transfer, all_of
from offload.swap.threads.worker import ParallelRunner, Worker
from offload.tiers.tier import Residency
from offload.tiers.units import round_up
from offload.zero.step.chunks import Chunk, ChunkBytes, GroupUpdate, Segment
from offload.zero.step.device_update import DeviceUpdate, DeviceWork
from offload.zero.step.matrices import MatrixUpdate, MatrixWork
from offload.zero.step.undo_codes import StepCall

_PAGE_NBYTES = 4096
_MIN_BLOCKS = 256  # blocks of 8-bit states per thread, at least


class UpdateQueue(PendingUpdates):
    """Runs pending updates on a thread of its own. `buffers` are its staging memory (1D uint8)."""

    def __init__(
        self, own: Float, run: ParallelRunner, seed: int, buffers: Sequence[torch.Tensor],
        fetcher: Fetcher, device: DeviceWork, matrices: MatrixWork, *, keep_records: bool = False,
    ) -> None:  # fmt: skip
        """`seed` is that of stochastic rounding; `fetcher` knows the next uses. `keep_records`:
        memory is left for records beside everything that is needed sooner. Where it is short,
        records on their way home would only take memory from parameters."""
        self._own = own
        self._run = run
        self._run_blocks = run.sharing(_MIN_BLOCKS)
        self._run_sections = run.sharing(1)
        self._seed = seed
        self._free = deque(buffers)
        self._staging = bool(buffers)  # False: every home is memory, nothing is ever staged
        self._lookahead = max(2, len(buffers) - 1)
        self._fetcher = fetcher
        self._keep_records = keep_records
        self.gate = SaveGate()  # of a save in the background
        self._waiting: OrderedDict[int, GroupUpdate] = OrderedDict()  # the next one first
        self._unfinished: dict[int, GroupUpdate] = {}
        self._lock = threading.Lock()
        self._device = device
        self._device_update = DeviceUpdate(device, own, seed)
        self._matrix_update = MatrixUpdate(matrices, own, seed, (run, self._run_blocks))
        self._chunks: Iterator[Chunk] | None = None
        self._active: deque[Chunk] = deque()
        self._on_device: list[tuple[Chunk, Transfer[None]]] = []  # queued there, not done yet
        self._leaving: deque[tuple[torch.Tensor | None, Transfer[list[None]]]] = deque()
        self.lane = Lane(WaitFor.UPDATE)
        self._worker = Worker("offload-update", self._work, self._fail)
        self.gate.on_passed = self._worker.wake

    # ---------------------------------------------------------------- for the model's thread
    def submit(self, updates: Sequence[GroupUpdate], *, first: bool = False) -> None:
        """Queue updates in order of next use; each one's `ready` fires when it can be read.
        `first`: before all that are waiting, as what backward came to last is used first.

        Work already queued on the model's stream may still read the weights and write the
        gradients.
        """
        for update in updates:  # a group has one at a time
            before = self._unfinished.get(update.group.index)
            if before is not None:
                before.ready.wait()
        so_far = mark_here(self._device.stream.device)
        with self._lock:
            self._raise_failure()  # a dead thread would never complete the updates submitted to it
            for update in updates:
                update.after = so_far
                update.ready.lane = self.lane
                update.group.pending_update.ready = update.ready
                self._unfinished[update.group.index] = update
                self._waiting[update.group.index] = update
                if first:
                    self._waiting.move_to_end(update.group.index, last=False)
        self._worker.wake()
        for update in updates:
            if not update.can_begin:
                update.state.gradients.landed.then(lambda _: self._worker.wake())

    def promote(self, index: int) -> None:
        """Note that a group is needed now: its update is the next to begin."""
        with self._lock:
            if index in self._waiting:
                self._waiting.move_to_end(index, last=False)
                self.gate.want(index)

    def is_pending(self, index: int) -> bool:
        return index in self._unfinished

    def withdraw(self, index: int) -> None:
        """Let a group's update not begin, or wait for its end if it has begun. Raises the error of
        a thread that has died."""
        with self._lock:
            self._raise_failure()
            update = self._waiting.pop(index, None)
            if update is not None:
                del self._unfinished[index]
        if update is None:
            update = self._unfinished.get(index)
        else:
            update.done()
            update.ready.complete(None)
        if update is not None:
            update.ready.wait()

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
        """Wait for the group being updated, which holds views of copies, or for one that waits for
        a save, and then uses its gradients up; False if there is none."""
        with self._lock:
            update = next((u for u in self._unfinished.values() if u.begun), None)
            if update is None:
                waiting = self._waiting.values()
                update = next((u for u in waiting if self.gate.holds_back(u.group.index)), None)
        if update is None or self._worker.is_this_thread():
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
        """Keep reads ahead, compute or queue one chunk, or wait for a write. Never waits for the
        device: the end of its work wakes this thread."""
        with self._device.stream.entered():
            self._reclaim(block=False)
            landed = self._land()
            while len(self._active) < self._lookahead:
                chunk = self._next_chunk()
                if chunk is None:
                    break
                self._active.append(chunk)
            if self._active:
                self._compute(self._active.popleft())
                return True
            return landed or self._reclaim(block=True)

    def _land(self) -> bool:
        """Send home what the device has computed."""
        queued, self._on_device = self._on_device, []
        for chunk, ended in queued:
            if not ended.done():
                self._on_device.append((chunk, ended))
                continue
            ended.wait()
            self._send_home(chunk)
        return len(self._on_device) < len(queued)

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

    def _next_chunk(self) -> Chunk | None:
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
            # one that waits for other ranks must not hold what the reduction needs to end
            waiting = (each for each in self._waiting.values() if each.can_begin)
            update = next((each for each in waiting if self.gate.admits(each.group.index)), None)
            if update is None:
                return None
            del self._waiting[update.group.index]
            update.begun = True
        update.chunks_left = len(update.chunks)
        update.after.before_compute()
        return update

    def _start_chunks(self, update: GroupUpdate) -> Iterator[Chunk]:
        state = update.state
        group = update.group
        by_device = all(record.at_home_on_device for record in state.records)
        if not by_device or group.state.residency() is Residency.ABSENT:
            # The forward is next: let the weights be updated where it will read them, if there is
            # room.
            group.state.prefetch_host(next_use=self._fetcher.next_use(group.index))
        for index in update.chunks:
            record = state.records[index]
            if self._keep_records:
                next_use = next_update(self._fetcher.trace, group.index)
                record.prefetch_host(next_use=next_use)
            gradient = None
            if update.has_gradients:
                gradients = state.gradients
                gradient = ChunkBytes(gradients.state, index, before=gradients.landed)
            chunk = Chunk(
                update, index, state.record_format, ChunkBytes(group.state, index),
                ChunkBytes(record, 0), gradient,
            )  # fmt: skip
            chunk.buffer = self._stage(chunk)
            yield chunk

    def _stage(self, chunk: Chunk) -> torch.Tensor | None:
        """Find each part in memory, or start reading it into a buffer; returns the buffer used."""
        buffer: torch.Tensor | None = None
        offset = 0
        for part in chunk.parts:
            if chunk.by_device:
                part.on_device = part.home.device_piece(part.piece)
                if not part.needed_on_host:
                    continue
            part.find_in_host_memory()
            if part.in_place is not None:
                continue
            if buffer is None:
                buffer = self._free.popleft()
            end = offset + round_up(part.nbytes, _PAGE_NBYTES)
            part.staged = buffer[offset:end]
            if part.on_device is None:  # else it is overwritten from there
                part.arrival = part.home.read_piece(part.piece, part.staged)
            offset = end
        return buffer

    def _compute(self, chunk: Chunk) -> None:
        whole = chunk.update.group.matrices
        if whole or not chunk.by_device:
            with profiled(f"{self.lane.kind} of {chunk.update.group.name}"):
                done = self._matrix_update.step(chunk) if whole else self._step_here(chunk)
            for each in done:
                self._send_home(each)
            return
        ended = self._device_update.step(chunk)
        if ended.done():
            ended.wait()
            self._send_home(chunk)
            return
        self._on_device.append((chunk, ended))
        ended.then(lambda _: self._worker.wake())

    def _step_here(self, chunk: Chunk) -> list[Chunk]:
        update, number, run = chunk.update, chunk.number, self._run_sections
        before = update.undoes
        if before is not None and before.codes is not None and number in before.codes.made:
            before.codes.undo(number, [c for c, *_ in self._calls(chunk, before.segments)], run)
        calls = list(self._calls(chunk, update.segments))
        if update.codes is not None and update.codes.step(number, [c for c, *_ in calls], run):
            return [chunk]
        kept = chunk.record_format
        blocks = kept.state_format is StateFormat.INT8
        for (given, named), scales, segment, span in calls:
            optimizer_step(
                *given, **named, state_format=kept.state_format, scales=scales,
                noise=chunk.noise(self._seed, segment.step, span),
                missed=[
                    Missed(scalars, chunk.noise(self._seed, step, span))
                    for scalars, step in segment.missed
                ],
                run=self._run_blocks if blocks else self._run,
            )  # fmt: skip
        return [chunk]

    def _calls(
        self, chunk: Chunk, segments: Sequence[Segment]
    ) -> Iterator[tuple[StepCall, Sequence[Array], Segment, slice]]:
        """Yield what kernels are called with for each of the segments, once the bytes of the chunk
        have arrived."""
        weight, record = chunk.weight.wait(), chunk.record.wait()
        numel, kept = len(chunk.elements), chunk.record_format
        grad_float = chunk.update.state.gradients.format
        weights = array_of(weight[: numel * self._own.nbytes], self._own)
        grads: Array | None = None
        if chunk.gradient is not None:
            grads = array_of(chunk.gradient.wait()[: numel * grad_float.nbytes], grad_float)
        arrays = kept.arrays(record, numel)
        for segment, span in chunk.segments(segments):
            grad = grads[span] if grads is not None and segment.has_gradient else None
            own = kept.operands(arrays, span, segment.scalars)
            named: dict[str, Any] = {"grad_float": grad_float, "weight_float": self._own}
            named |= {"low": own.low, "master": own.master}
            given = (grad, weights[span], own.states, segment.scalars)
            yield (given, named), own.scales, segment, span

    def _send_home(self, chunk: Chunk) -> None:
        update = chunk.update
        is_left = update.codes is not None and chunk.number in update.codes.left  # not changed
        weight_write = None if is_left else chunk.weight.send_home()
        record_write = None if is_left else chunk.record.send_home()
        if weight_write is not None:
            update.weight_writes.append(weight_write)
        writes = [write for write in (weight_write, record_write) if write is not None]
        if writes or chunk.buffer is not None:
            self._leaving.append((chunk.buffer, all_of(writes)))
        for part in chunk.parts:
            part.let_go()
        update.chunks_left -= 1
        if not update.chunks_left:
            update.done()
            writes_of_all = all_of(update.weight_writes)
            writes_of_all.then(lambda written: self._announce(update, written))

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
            self._waiting.clear()
        for update in updates:
            if not update.ready.done():
                update.ready.fail(error)


def next_update(trace: Trace, index: int) -> float:
    """Return the uses until a group's optimizer states are needed: behind its first use of the next
    cycle."""
    return trace.next_cycle_use(index) + 0.5
