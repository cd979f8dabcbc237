"""Muon: updates of whole matrices, whose chunks are stepped in two passes with products between.

    chunk       0        1        2        3             matrix a ends in chunk 1, b in chunk 3
    average    a       a b        b        b             the momentum, and the input of the products
    products             a                 b             Newton-Schulz, where the model computes
    weights            a a               b b b           of the chunks that waited for them

A chunk goes home once the matrices that it has a part of are done; until then it keeps its buffers.
Both passes are rules of `kernels`, with the same bits wherever a chunk is stepped, and products are
always computed on one device, so that no placement and no length of chunks changes a bit.
"""

from dataclasses import dataclass
from typing import Any

import torch

from offload.kernels.bits import DTYPE_OF, FLOAT_OF, flat_array
from offload.kernels.cpu.optimizer import optimizer_step
from offload.kernels.floats import Float
from offload.kernels.gpu import triton_optimizer
from offload.kernels.newton_schulz import orthogonalise
from offload.kernels.rules import MuonScalars, Scalars, StateFormat
from offload.swap.threads.worker import ParallelRunner
from offload.zero.step.chunks import Chunk, ChunkBytes, Segment
from offload.zero.step.device_update import device_arrays, mark_used


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """Memory (1D uint8) of the products, for the largest matrix: `memory` where the model computes,
    and `host` for chunks that the CPU steps: beside a GPU four bytes per element, else the same."""

    memory: torch.Tensor
    host: torch.Tensor
    dtype: torch.dtype  # of the products


class MatrixUpdate:
    """Steps the chunks of groups of matrices, in order. For the update thread."""

    def __init__(
        self, work: MatrixWork, own: Float, seed: int, runs: tuple[ParallelRunner, ParallelRunner]
    ) -> None:
        """`runs`: for elements, and for blocks of 8-bit states."""
        self._work = work
        self._dtype = DTYPE_OF[own]
        self._seed = seed
        self._runs = runs
        self._held: list[Chunk] = []  # for a matrix that is not complete yet

    def step(self, chunk: Chunk) -> list[Chunk]:
        """Take the next chunk of a group; return those that are done, in order."""
        done: list[Chunk] = []
        self._held.append(chunk)
        for matrix, here in chunk.segments():
            self._average(chunk, matrix, here)
            if chunk.elements.start + here.stop < matrix.stop:
                return done
            self._change_weights(matrix)
            done += self._held[:-1]
            self._held = [chunk]
        done += self._held
        self._held = []
        for each in done:
            if each.by_device:
                mark_used(each, self._work.memory.device)
        return done

    def _average(self, chunk: Chunk, matrix: Segment, here: slice) -> None:
        """Average the gradient into the momentum, and write the input of the products."""
        assert chunk.gradient is not None, "no step of a matrix is made without its gradient"
        there = _shifted(here, chunk.elements.start - matrix.start)
        memory = self._work.memory if chunk.by_device else self._work.host
        into = memory.view(torch.float32)[there].zero_()  # the rule multiplies what is there by 0
        gradients = _values(chunk, chunk.gradient, DTYPE_OF[chunk.update.state.gradients.format])
        self._pass(chunk, here, gradients[here], into, matrix.scalars, matrix.step)
        if memory is not self._work.memory:
            self._work.memory.view(torch.float32)[there].copy_(into)

    def _change_weights(self, matrix: Segment) -> None:
        """Compute the products of a matrix, and step the weights of its chunks, which are held."""
        state, scalars = self._held[0].update.state, matrix.scalars
        assert isinstance(scalars, MuonScalars), "groups of matrices are Muon's"
        start = state.part.trainable.start + matrix.start
        spec = next(each for each in state.group.layout.params if each.offset == start)
        on_device = orthogonalise(self._work.memory, spec.shape, scalars, self._work.dtype)
        on_host = self._work.host.view(on_device.dtype)[: len(on_device)]
        if self._work.host is not self._work.memory:
            on_host.copy_(on_device)
        for chunk in self._held:
            ((_, here),) = chunk.segments([matrix])
            there = _shifted(here, chunk.elements.start - matrix.start)
            result = (on_device if chunk.by_device else on_host)[there]
            weights = _values(chunk, chunk.weight, self._dtype)
            given = scalars.weight(*spec.shape)
            self._pass(chunk, here, result, weights[here], given, matrix.step)
            if chunk.by_device and not chunk.weight.home.at_home_on_device:
                chunk.weight.wait()[: weights.nbytes].copy_(weights.view(torch.uint8))

    def _pass(
        self, chunk: Chunk, here: slice, gradient: torch.Tensor, weight: torch.Tensor,
        scalars: Scalars, step: int,
    ) -> None:  # fmt: skip
        """Make one pass over a range of a chunk, where the chunk is stepped."""
        numel, kept = len(chunk.elements), chunk.record_format
        on_host = None if chunk.by_device else kept.arrays(chunk.record.wait(), numel)
        own: Any = kept.operands(on_host or device_arrays(chunk), here, scalars)
        named = {"scales": own.scales, "noise": chunk.noise(self._seed, step, here)}
        if not scalars.states:  # of the input, an fp32 weight, there is no master
            named |= {"low": own.low, "master": own.master}
        if chunk.by_device:
            triton_optimizer.optimizer_step(gradient, weight, own.states, scalars, **named)
            return
        optimizer_step(
            flat_array(gradient), flat_array(weight), own.states, scalars, **named,
            grad_float=FLOAT_OF[gradient.dtype], weight_float=FLOAT_OF[weight.dtype],
            state_format=kept.state_format, run=self._runs[kept.state_format is StateFormat.INT8],
        )  # fmt: skip


def _shifted(elements: slice, by: int) -> slice:
    return slice(elements.start + by, elements.stop + by)


def _values(chunk: Chunk, part: ChunkBytes, dtype: torch.dtype) -> torch.Tensor:
    """Return a part's values where the chunk is stepped: on the device a copy, if it has none."""
    raw = part.on_device if chunk.by_device else part.wait()
    if raw is None:
        raw = part.wait().to(chunk.record.device_bytes().device)
    return raw[: len(chunk.elements) * dtype.itemsize].view(dtype)
