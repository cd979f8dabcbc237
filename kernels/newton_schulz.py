"""Newton-Schulz iterations: the nearest half-orthogonal matrix, by products alone.

The arithmetic is that of torch.optim.Muon (Jordan et al., 2024), operation by operation, with the
bits of torch's kernels: those of a GPU, or of another number of threads, may differ. All memory is
the caller's. In it, each part padded to blocks of 256 elements, N those of the matrix and S the
square of its shorter side:

    ├─ N fp32: input, result ─┤├─ N: X ─┤├─ N: next X ─┤├─ S: X X^T ─┤├─ S: b X X^T + c (X X^T)^2 ─┤
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from offload.kernels.rules import BLOCK, MuonScalars

if TYPE_CHECKING:
    import torch


def products_nbytes(shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes that `orthogonalise` needs for a matrix, with products in a format of
    `itemsize` bytes."""
    return sum(_sizes(shape, itemsize))


def products_flops(shape: Sequence[int]) -> int:
    """Return the floating-point operations of one iteration: 2 per multiply-add."""
    side = min(shape)
    return 4 * math.prod(shape) * side + 2 * side**3


def _sizes(shape: Sequence[int], itemsize: int) -> list[int]:
    numel, square = (
        -(-each // BLOCK) * BLOCK for each in (math.prod(shape), min(shape, default=0) ** 2)
    )
    return [4 * numel, *[itemsize * numel] * 2, *[itemsize * square] * 2]


def orthogonalise(
    memory: torch.Tensor, shape: tuple[int, ...], scalars: MuonScalars, dtype: torch.dtype
) -> torch.Tensor:
    """Return what torch.optim.Muon makes of the fp32 matrix that `memory` (1D uint8) begins with:
    1D, in `dtype`, in its place. The rest of `memory` is overwritten."""
    import torch  # plans, which need no torch, count the bytes above

    numel, side = math.prod(shape), min(shape)
    sizes = _sizes(shape, dtype.itemsize)
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
