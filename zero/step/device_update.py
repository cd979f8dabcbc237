"""Chunks that the device steps, beside those that the CPU steps, with the same bits.

    to device     ├ gradient 0 ┤├ gradient 1 ┤
    update        .             ├ step 0 ┤.   ├ step 1 ┤
    to host       .                       ├ weight 0 ┤ ├ weight 1 ┤

All work is queued; the thread waits only for bytes that come from a file. A chunk's transfer is
done when all its work is. Buffers are used in turn: the copy into a buffer waits, on its stream,
until the previous content has left.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from offload.kernels.bits import DTYPE_OF
from offload.kernels.floats import Float
from offload.kernels.gpu import triton_optimizer
from offload.swap.device.device_slot import Links
from offload.swap.device.staging_ring import StagingRing
from offload.swap.device.streams import StreamEvent, WorkStream, mark_here
from offload.swap.threads.lanes import profiled
from offload.swap.threads.transfer import Transfer
from offload.tiers.units import round_up
from offload.zero.step.chunks import Chunk, ChunkBytes
from offload.zero.step.records import ALIGN_NBYTES

# What a kernel on the device takes for the arrays of a record: 16-bit floats have a type there.
_DTYPES = {
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint16): torch.bfloat16,
    np.dtype(np.int16): torch.int16,
    np.dtype(np.uint8): torch.uint8,
}


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """The streams and memory of a device that updates and gradients use beside the model. On a
    CPU streams do nothing."""

    stream: WorkStream  # for the update thread
    links: Links  # for the update's own copies
    buffers: Sequence[torch.Tensor] = ()  # 1D uint8 on the device: staging of chunks stepped there
    partials: torch.Tensor | None = None  # 1D fp64 on the device: room for all sums of squares
    ring: StagingRing | None = None  # on the way to accumulators in host memory


class DeviceUpdate:
    """Steps chunks on the device. For the update thread, within the work's stream."""

    def __init__(self, work: DeviceWork, own: Float, seed: int) -> None:
        self._work = work
        self._own = own
        self._seed = seed
        self._left = [StreamEvent()] * len(work.buffers)
        self._next = 0

    def step(self, chunk: Chunk) -> Transfer[None]:
        """Queue all of a chunk's work. When the transfer is done, the chunk's new bytes are at home
        on the device, or in host memory, still to be sent home."""
        missing = [
            part for part in (chunk.weight, chunk.gradient)
            if part is not None and part.on_device is None
        ]  # fmt: skip
        fetched = self._fetch(missing)
        fetched.before_compute()
        with profiled(f"update of {chunk.update.group.name}"):
            self._run(chunk)
        stepped = mark_used(chunk, self._work.stream.device)
        what = f"the step of {chunk.weight.home.name} on the device"
        if not chunk.weight.home.at_home_on_device:
            target = chunk.weight.wait()[: chunk.weight.nbytes]
            source = chunk.weight.device_bytes()
            left = self._work.links.to_host.copy(target, source, after=(stepped,))
            ended = self._work.links.to_host.transfer(left, what)
        else:
            left = stepped
            ended = self._work.links.to_device.transfer(fetched, what)
        if missing:
            self._left[self._next] = left
            self._next = (self._next + 1) % len(self._left)
        return ended

    def _fetch(self, missing: Sequence[ChunkBytes]) -> StreamEvent:
        """Copy the parts that are not on the device from host memory into the next buffer."""
        mark, offset = StreamEvent(), 0
        for part in missing:
            end = offset + part.nbytes
            part.copied = self._work.buffers[self._next][offset:end]
            source = part.wait()[: part.nbytes]
            before = (self._left[self._next],)
            mark = self._work.links.to_device.copy(part.copied, source, after=before)
            offset = round_up(end, ALIGN_NBYTES)
        return mark

    def _run(self, chunk: Chunk) -> None:
        numel, kept = len(chunk.elements), chunk.record_format
        weights = chunk.weight.device_bytes()[: numel * self._own.nbytes].view(DTYPE_OF[self._own])
        grads: torch.Tensor | None = None
        if chunk.gradient is not None:
            grad_float = chunk.update.state.gradients.format
            grads = chunk.gradient.device_bytes()[: numel * grad_float.nbytes]
            grads = grads.view(DTYPE_OF[grad_float])
        arrays = device_arrays(chunk)
        for segment, span in chunk.segments():
            own = kept.operands(arrays, span, segment.scalars)
            given = grads[span] if grads is not None and segment.has_gradient else None
            steps = [
                *((None, *each) for each in segment.missed),
                (given, segment.scalars, segment.step),
            ]
            for gradient, scalars, step in steps:
                triton_optimizer.optimizer_step(
                    gradient, weights[span], own.states, scalars,
                    scales=own.scales, low=own.low, master=own.master,
                    noise=chunk.noise(self._seed, step, span),
                )  # fmt: skip


def device_arrays(chunk: Chunk) -> dict[str, torch.Tensor]:
    """Return views of a record on the device, as `RecordFormat.arrays` does in host memory."""
    record, spans = chunk.record.device_bytes(), chunk.record_format.spans(len(chunk.elements))
    return {f.name: record[span].view(_DTYPES[f.dtype]) for f, span in spans}


def mark_used(chunk: Chunk, device: torch.device) -> StreamEvent:
    """Mark the end of what is queued on the device for a chunk."""
    stepped = mark_here(device)
    for part in chunk.parts:
        if part.on_device is not None:
            part.home.used_device_piece(part.piece, stepped)
    return stepped
