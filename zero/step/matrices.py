"""Muon: updates of whole matrices, whose chunks are stepped in two passes with products between.

    chunk       0        1        2        3             matrix a ends in chunk 1, b in chunk 3
    average    a       a b        b        b             the momentum, and the input of the products
    products             a                 b             Newton-Schulz, where the model computes
    weights            a a               b b b           of the chunks that waited for them

A chunk goes home once the matrices that it has a part of are done; until then it keeps its buffers.
Both passes are rules of `kernels`, with the same bits wherever a chunk is stepped, and products are
always computed on one device, so that no placement and no length of chunks changes a bit. The
products are those of torch.optim.Muon (Jordan et al., 2024), operation by operation. Their bits are
those of torch's kernels: another number of threads, CPU or GPU may have others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offload.kernels.cpu.optimizer import optimizer_step
from offload.kernels.floats import Float
from offload.kernels.gpu import triton_optimizer
from offload.kernels.rules import MuonScalars, Scalars, StateFormat
from offload.swap.device.streams import mark_here
from offload.swap.threads.worker import ParallelRunner
from offload.tiers.units import round_up
from offload.zero.groups.bits import DTYPE_OF, FLOAT_OF, array_of
from offload.zero.groups.layout import ParamSpec
from offload.zero.step.chunks import Chunk, ChunkBytes, Segment
from offload.zero.step.device_update import RECORD_DTYPES

_ALIGN_NBYTES = 256
_MIN_BLOCKS = 256  # blocks of 8-bit states per thread, at least
_EMPTY = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """The memory of the products, for the largest matrix: `memory` where the model computes, and
    `host` on a GPU, for chunks that the CPU steps. They are computed in `dtype`."""

    memory: torch.Tensor = _EMPTY  # 1D uint8, `products_nbytes` of it
    host: torch.Tensor = _EMPTY  # 1D uint8, four bytes per element
    dtype: torch.dtype = torch.bfloat16


def products_nbytes(shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes for the products of one matrix: its fp32 input, two matrices of its shape,
    and two square ones of its shorter side."""
    numel, side = math.prod(shape), min(shape)
    parts = (4 * numel, itemsize * numel, itemsize * numel, itemsize * side**2, itemsize * side**2)
    return sum(round_up(nbytes, _ALIGN_NBYTES) for nbytes in parts)


def orthogonalise(
    memory: torch.Tensor, shape: torch.Size, scalars: MuonScalars, dtype: torch.dtype
) -> torch.Tensor:
    """Return what torch.optim.Muon computes of the matrix that `memory` (1D uint8) begins with (in
    fp32, row by row): 1D, in `dtype`, in its place. The rest of `memory` is overwritten."""
    numel, side = shape.numel(), min(shape)
    given, first, second, gram, update = _cut(memory, numel, side, dtype)
    coefficients = scalars.ns_a, scalars.ns_b, scalars.ns_c
    is_tall = shape[0] > shape[1]
    matrix = first.view(shape)
    matrix.copy_(given.view(shape))
    result = given.view(dtype)[:numel]
    if is_tall:
        matrix = matrix.T
    matrix.div_(matrix.norm().clamp(min=scalars.eps))
    others = [second.view(matrix.shape), first.view(matrix.shape)]
    a, b, c = coefficients
    for number in range(int(scalars.ns_steps)):
        torch.mm(matrix, matrix.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=update)
        matrix = torch.addmm(matrix, update, matrix, beta=a, out=others[number % 2])
    result.view(shape).copy_(matrix.T if is_tall else matrix)
    return result


def _cut(
    memory: torch.Tensor, numel: int, side: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    kinds = [(numel, torch.float32), *[(numel, dtype)] * 2, *[(side * side, dtype)] * 2]
    parts, start = [], 0
    for count, kind in kinds:
        stop = start + count * kind.itemsize
        parts.append(memory[start:stop].view(kind))
        start = round_up(stop, _ALIGN_NBYTES)
    return *parts[:3], parts[3].view(side, side), parts[4].view(side, side)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix of a group's update; `spec` counts elements from the first of the rank's part."""

    spec: ParamSpec
    shape: torch.Size
    scalars: MuonScalars
    step: int

    def within(self, chunk: Chunk) -> tuple[slice, slice]:
        """Return its range in a chunk, and that range in itself."""
        lo, hi = (
            max(self.spec.offset, chunk.elements.start),
            min(self.spec.stop, chunk.elements.stop),
        )
        start, first = chunk.elements.start, self.spec.offset
        return slice(lo - start, hi - start), slice(lo - first, hi - first)


class MatrixUpdate:
    """Steps the chunks of groups of matrices, in order. For the update thread."""

    def __init__(self, work: MatrixWork, own: Float, seed: int, run: ParallelRunner) -> None:
        self._work = work
        self._own = own
        self._seed = seed
        self._run, self._run_blocks = run, run.sharing(_MIN_BLOCKS)
        self._held: list[Chunk] = []  # for a matrix that is not complete yet

    def step(self, chunk: Chunk) -> list[Chunk]:
        """Take the next chunk of a group; return those that are done, in order."""
        done: list[Chunk] = []
        self._held.append(chunk)
        waits = False
        for matrix in _matrices(chunk):
            here, there = matrix.within(chunk)
            if not there.start:
                self._input(matrix.spec.numel).zero_()  # what the last matrix left may be no number
            self._average(chunk, matrix, here, there)
            waits = there.stop < matrix.spec.numel
            if waits:
                break
            self._multiply(matrix)
            for held in self._held:
                self._change_weights(held, matrix)
            done += self._held[:-1]
            self._held = [chunk]
        if not waits:
            done += self._held
            self._held = []
        return done

    # ---------------------------------------------------------------- memory
    @property
    def _has_gpu(self) -> bool:
        return self._work.memory.device.type != "cpu"

    def _input(self, numel: int, *, on_host: bool = False) -> torch.Tensor:
        """Return the fp32 input of the products, 1D; later in its place the result."""
        memory = self._work.host if on_host and self._has_gpu else self._work.memory
        return memory[: 4 * numel].view(torch.float32)

    def _multiply(self, matrix: _Matrix) -> None:
        numel, work = matrix.spec.numel, self._work
        if numel:
            result = orthogonalise(work.memory, matrix.shape, matrix.scalars, work.dtype)
            if self._has_gpu and not all(held.by_device for held in self._held):
                self._input(numel, on_host=True).view(work.dtype)[:numel].copy_(result)

    # ---------------------------------------------------------------- the passes
    def _average(self, chunk: Chunk, matrix: _Matrix, here: slice, there: slice) -> None:
        """Average the gradient into the momentum, and write the input of the products."""
        assert chunk.gradient is not None, "no step of a matrix is made without its gradient"
        into = self._input(matrix.spec.numel, on_host=not chunk.by_device)[there]
        kind = DTYPE_OF[chunk.update.state.gradients.format]
        gradient = _bytes(chunk, chunk.gradient)[: len(chunk.elements) * kind.itemsize].view(kind)
        self._make(chunk, here, gradient[here], into, matrix.scalars, matrix.step)
        if self._has_gpu and not chunk.by_device:
            self._input(matrix.spec.numel)[there].copy_(into)

    def _change_weights(self, chunk: Chunk, matrix: _Matrix) -> None:
        here, there = matrix.within(chunk)
        result = self._input(matrix.spec.numel, on_host=not chunk.by_device)
        result = result.view(self._work.dtype)[there]
        kind = DTYPE_OF[self._own]
        raw = _bytes(chunk, chunk.weight)[: len(chunk.elements) * kind.itemsize]
        scalars = matrix.scalars.weight(*matrix.shape)
        self._make(chunk, here, result, raw.view(kind)[here], scalars, matrix.step)
        if chunk.by_device and not chunk.weight.home.at_home_on_device:
            chunk.weight.wait()[: raw.numel()].copy_(raw)

    def _make(
        self, chunk: Chunk, here: slice, gradient: torch.Tensor, weight: torch.Tensor,
        scalars: Scalars, step: int,
    ) -> None:  # fmt: skip
        """Make one pass over a range of a chunk, where the chunk is stepped."""
        numel, kept = len(chunk.elements), chunk.record_format
        noise, changes = chunk.noise(self._seed, step, here), not scalars.states
        if chunk.by_device:
            record = _bytes(chunk, chunk.record)
            there = {f.name: record[s].view(RECORD_DTYPES[f.dtype]) for f, s in kept.spans(numel)}
            on_device = kept.operands(there, here, scalars)
            triton_optimizer.optimizer_step(
                gradient, weight, on_device.states, scalars, scales=on_device.scales, noise=noise,
                low=on_device.low if changes else None,
                master=on_device.master if changes else None,
            )  # fmt: skip
            _used(chunk)
            return
        own = kept.operands(kept.arrays(chunk.record.wait(), numel), here, scalars)
        masters: dict[str, Any] = {"low": own.low, "master": own.master} if changes else {}
        optimizer_step(
            _array(gradient), _array(weight), own.states, scalars, scales=own.scales, noise=noise,
            grad_float=FLOAT_OF[gradient.dtype], weight_float=FLOAT_OF[weight.dtype],
            state_format=kept.state_format, **masters,
            run=self._run_blocks if kept.state_format is StateFormat.INT8 else self._run,
        )  # fmt: skip


def _matrices(chunk: Chunk) -> Iterator[_Matrix]:
    """Yield the matrices that have a part in a chunk and a gradient, in order."""
    state = chunk.update.state
    segments: Sequence[Segment] = chunk.update.segments
    for index, part in sorted(state.parts.items(), key=lambda item: item[1].spec.offset):
        spec = part.spec
        if (
            spec.offset >= chunk.elements.stop
            or spec.stop <= chunk.elements.start
            or not spec.numel
        ):
            continue
        of = next((each for each in segments if each.start <= spec.offset < each.stop), None)
        if of is not None:
            assert isinstance(of.scalars, MuonScalars), "groups of matrices are Muon's"
            shape = torch.Size(state.group.layout.params[index].shape)
            yield _Matrix(spec, shape, of.scalars, of.step)


def _bytes(chunk: Chunk, part: ChunkBytes) -> torch.Tensor:
    """Return a part's bytes where the chunk is stepped: on the device a copy, if it has none."""
    if not chunk.by_device:
        return part.wait()
    if part.on_device is not None:
        return part.on_device
    record = chunk.record.on_device
    assert record is not None, "records at home on the device are there"
    return part.wait().to(record.device)


def _used(chunk: Chunk) -> None:
    for part in chunk.parts:
        if part.on_device is not None:
            part.home.used_device_piece(part.piece, mark_here(part.on_device.device))


def _array(values: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    return array_of(values.view(torch.uint8), FLOAT_OF[values.dtype])
