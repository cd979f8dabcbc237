"""Muon: updates of whole matrices, whose chunks are stepped in two passes with products between.

    chunk       0        1        2        3             matrix a ends in chunk 1, b in chunk 3
    average    a       a b        b        b             the momentum, and the input of the products
    products             a                 b             Newton-Schulz, where the model computes
    weights            a a               b b b           of the chunks that waited for them

A chunk goes home once the matrices that it has a part of are done; until then it keeps its buffers.
Both passes are rules of `kernels`, with the same bits wherever a chunk is stepped, and products are
always computed on one device, so that no placement and no length of chunks changes a bit. Products
are those of torch.optim.Muon (Jordan et al., 2024), operation by operation, with the bits of
torch's kernels: those of a GPU, or of another number of threads, may differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.kernels.cpu.optimizer import optimizer_step
from offload.kernels.floats import Float
from offload.kernels.gpu import triton_optimizer
from offload.kernels.rules import MuonScalars, Scalars, StateFormat
from offload.swap.device.streams import mark_here
from offload.swap.threads.worker import ParallelRunner
from offload.zero.groups.bits import DTYPE_OF, FLOAT_OF, flat_array
from offload.zero.groups.layout import ALIGN_NUMEL
from offload.zero.step.chunks import Chunk, ChunkBytes
from offload.zero.step.device_update import RECORD_DTYPES

_MIN_BLOCKS = 256  # blocks of 8-bit states per thread, at least
_NONE = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """The memory of the products, for the largest matrix: `memory` where the model computes, and
    `host` on a GPU, for chunks that the CPU steps. They are computed in `dtype`."""

    memory: torch.Tensor = _NONE  # 1D uint8, `products_nbytes` of it
    host: torch.Tensor = _NONE  # 1D uint8, four bytes per element
    dtype: torch.dtype = torch.bfloat16


def products_nbytes(shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes for the products of one matrix: its fp32 input, two matrices of its shape,
    and two square ones of its shorter side."""
    numel, square = math.prod(shape), min(shape) ** 2
    return sum(_sizes(numel, square, itemsize))


def _sizes(numel: int, square: int, itemsize: int) -> list[int]:
    padded, end = (-(-each // ALIGN_NUMEL) * ALIGN_NUMEL for each in (numel, square))
    return [4 * padded, *[itemsize * padded] * 2, *[itemsize * end] * 2]


def orthogonalise(
    memory: torch.Tensor, shape: torch.Size, scalars: MuonScalars, dtype: torch.dtype
) -> torch.Tensor:
    """Return what torch.optim.Muon makes of the fp32 matrix that `memory` (1D uint8) begins with:
    1D, in `dtype`, in its place. The rest of `memory` is overwritten."""
    numel, side = shape.numel(), min(shape)
    sizes = _sizes(numel, side**2, dtype.itemsize)
    given, *parts = memory[: sum(sizes)].split(sizes)
    first, second = (part.view(dtype)[:numel] for part in parts[:2])
    gram, update = (part.view(dtype)[: side**2].view(side, side) for part in parts[2:])
    matrix = first.view(shape)
    matrix.copy_(given.view(torch.float32)[:numel].view(shape))
    is_tall = shape[0] > shape[1]
    matrix = matrix.T if is_tall else matrix
    matrix.div_(matrix.norm().clamp(min=scalars.eps))
    others = second.view(matrix.shape), first.view(matrix.shape)
    for number in range(int(scalars.ns_steps)):
        torch.mm(matrix, matrix.T, out=gram)
        torch.addmm(gram, gram, gram, beta=scalars.ns_b, alpha=scalars.ns_c, out=update)
        matrix = torch.addmm(matrix, update, matrix, beta=scalars.ns_a, out=others[number % 2])
    result: torch.Tensor = given.view(dtype)[:numel]
    result.view(shape).copy_(matrix.T if is_tall else matrix)
    return result


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix of a group's update, at elements counted from the first of the rank's part."""

    elements: range
    shape: torch.Size
    scalars: MuonScalars
    step: int

    def within(self, chunk: Chunk) -> tuple[slice, slice]:
        """Return its range in a chunk, and that range in itself."""
        lo = max(self.elements.start, chunk.elements.start)
        hi = min(self.elements.stop, chunk.elements.stop)
        start, first = chunk.elements.start, self.elements.start
        return slice(lo - start, hi - start), slice(lo - first, hi - first)


class MatrixUpdate:
    """Steps the chunks of groups of matrices, in order. For the update thread."""

    def __init__(self, work: MatrixWork, own: Float, seed: int, run: ParallelRunner) -> None:
        self._work = work
        self._dtype = DTYPE_OF[own]
        self._seed = seed
        self._run, self._run_blocks = run, run.sharing(_MIN_BLOCKS)
        self._has_gpu = work.memory.device.type != "cpu"
        self._held: list[Chunk] = []  # for a matrix that is not complete yet

    def step(self, chunk: Chunk) -> list[Chunk]:
        """Take the next chunk of a group; return those that are done, in order."""
        done: list[Chunk] = []
        self._held.append(chunk)
        for matrix in _matrices(chunk):
            here, there = matrix.within(chunk)
            if not there.start:
                self._input(matrix).zero_()  # what the last matrix left may be no number
            self._average(chunk, matrix, here, there)
            if there.stop < len(matrix.elements):
                return done
            self._multiply(matrix)
            for held in self._held:
                self._change_weights(held, matrix)
            done += self._held[:-1]
            self._held = [chunk]
        done += self._held
        self._held = []
        return done

    def _input(self, matrix: _Matrix, *, on_host: bool = False) -> torch.Tensor:
        """Return the fp32 input of the products, 1D; later in its place the result."""
        memory = self._work.host if on_host and self._has_gpu else self._work.memory
        return memory[: 4 * len(matrix.elements)].view(torch.float32)

    def _average(self, chunk: Chunk, matrix: _Matrix, here: slice, there: slice) -> None:
        """Average the gradient into the momentum, and write the input of the products."""
        assert chunk.gradient is not None, "no step of a matrix is made without its gradient"
        into = self._input(matrix, on_host=not chunk.by_device)[there]
        gradients = _values(chunk, chunk.gradient, DTYPE_OF[chunk.update.state.gradients.format])
        self._pass(chunk, here, gradients[here], into, matrix.scalars, matrix.step)
        if self._has_gpu and not chunk.by_device:
            self._input(matrix)[there].copy_(into)

    def _multiply(self, matrix: _Matrix) -> None:
        result = orthogonalise(self._work.memory, matrix.shape, matrix.scalars, self._work.dtype)
        if self._has_gpu and not all(held.by_device for held in self._held):
            self._input(matrix, on_host=True).view(result.dtype)[: len(result)].copy_(result)

    def _change_weights(self, chunk: Chunk, matrix: _Matrix) -> None:
        here, there = matrix.within(chunk)
        result = self._input(matrix, on_host=not chunk.by_device).view(self._work.dtype)[there]
        weights = _values(chunk, chunk.weight, self._dtype)
        self._pass(
            chunk, here, result, weights[here], matrix.scalars.weight(*matrix.shape), matrix.step
        )
        if chunk.by_device and not chunk.weight.home.at_home_on_device:
            chunk.weight.wait()[: weights.nbytes].copy_(weights.view(torch.uint8))

    def _pass(
        self, chunk: Chunk, here: slice, gradient: torch.Tensor, weight: torch.Tensor,
        scalars: Scalars, step: int,
    ) -> None:  # fmt: skip
        """Make one pass over a range of a chunk, where the chunk is stepped."""
        numel, kept = len(chunk.elements), chunk.record_format
        noise, changes_weights = chunk.noise(self._seed, step, here), not scalars.states
        if chunk.by_device:
            record = chunk.record.device_bytes()
            tensors = {f.name: record[s].view(RECORD_DTYPES[f.dtype]) for f, s in kept.spans(numel)}
            there = kept.operands(tensors, here, scalars)
            masters: dict[str, Any] = {"low": there.low, "master": there.master}
            triton_optimizer.optimizer_step(
                gradient, weight, there.states, scalars, scales=there.scales, noise=noise,
                **(masters if changes_weights else {}),
            )  # fmt: skip
            for part in chunk.parts:
                if part.on_device is not None:
                    part.home.used_device_piece(part.piece, mark_here(record.device))
            return
        own = kept.operands(kept.arrays(chunk.record.wait(), numel), here, scalars)
        masters = {"low": own.low, "master": own.master} if changes_weights else {}
        optimizer_step(
            flat_array(gradient), flat_array(weight), own.states, scalars, scales=own.scales,
            grad_float=FLOAT_OF[gradient.dtype], weight_float=FLOAT_OF[weight.dtype],
            state_format=kept.state_format, noise=noise, **masters,
            run=self._run_blocks if kept.state_format is StateFormat.INT8 else self._run,
        )  # fmt: skip


def _matrices(chunk: Chunk) -> Iterator[_Matrix]:
    """Yield the matrices that have a part in a chunk and a gradient, in order."""
    state, here = chunk.update.state, chunk.elements
    for index, part in sorted(state.parts.items(), key=lambda item: item[1].spec.offset):
        elements = range(part.spec.offset, part.spec.stop)
        if not elements or elements.start >= here.stop or elements.stop <= here.start:
            continue
        for of in chunk.update.segments:
            if of.start <= elements.start < of.stop:
                assert isinstance(of.scalars, MuonScalars), "groups of matrices are Muon's"
                shape = torch.Size(state.group.layout.params[index].shape)
                yield _Matrix(elements, shape, of.scalars, of.step)


def _values(chunk: Chunk, part: ChunkBytes, dtype: torch.dtype) -> torch.Tensor:
    """Return a part's values where the chunk is stepped: on the device a copy, if it has none."""
    if not chunk.by_device:
        raw = part.wait()
    elif part.on_device is not None:
        raw = part.on_device
    else:
        raw = part.wait().to(chunk.record.device_bytes().device)
    return raw[: len(chunk.elements) * dtype.itemsize].view(dtype)
