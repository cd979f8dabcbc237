"""Tensors in 8 bits per element (on the way between ranks: ZeRO++, Wang et al., 2023). Approximate.

A block of 256 elements shares a scale, its largest magnitude / 127; an element becomes the nearest
multiple of it, so it is off by at most half a scale. A block with an infinity or a NaN decodes to
NaN, so that overflow is still detected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from offload.zero.ranks.sharding import CODE_BLOCK_NUMEL, codes_nbytes

_STEP_NUMEL = 1 << 20  # elements per piece of work, which bounds the fp32 temporaries


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """Elements of `dtype` stored as their codes, and behind those the scales (a `swap.Codec`)."""

    dtype: torch.dtype

    def stored_nbytes(self, nbytes: int) -> int:
        numel, rest = divmod(nbytes, self.dtype.itemsize)
        if rest or numel % CODE_BLOCK_NUMEL:
            raise ValueError(f"{nbytes} bytes of {self.dtype} are no blocks of {CODE_BLOCK_NUMEL}")
        return codes_nbytes(numel)

    def encode(self, values: torch.Tensor, stored: torch.Tensor) -> None:
        encode(values.view(self.dtype), *self._parts(values, stored))

    def update(self, values: torch.Tensor, stored: torch.Tensor) -> None:
        self.encode(values, stored)

    def decode(self, stored: torch.Tensor, values: torch.Tensor) -> None:
        decode(*self._parts(values, stored), values.view(self.dtype))

    def _parts(
        self, values: torch.Tensor, stored: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        numel = values.numel() // self.dtype.itemsize
        end = codes_nbytes(numel)
        return stored[:numel].view(torch.int8), stored[numel:end].view(torch.float32)


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill `codes` (int8) and `scales` (fp32, one per block) from `values`. 1D; whole blocks."""
    for span, blocks in _steps(values.numel()):
        rows = values[span].float().view(-1, CODE_BLOCK_NUMEL)
        scale = rows.abs().amax(dim=1) / 127
        scales[blocks] = scale
        rows = rows / torch.where(scale > 0, scale, 1.0)[:, None]  # they may be the values
        codes[span].view(-1, CODE_BLOCK_NUMEL).copy_(rows.round_().nan_to_num_(0, 0, 0))


def decode(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Decode into any float format: the reverse of `encode`."""
    for span, blocks in _steps(out.numel()):
        rows = codes[span].float().view(-1, CODE_BLOCK_NUMEL) * _or_nan(scales[blocks])[:, None]
        out[span].copy_(rows.view(-1))


def add_decoded(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Add the decoded values (fp32) to `out`."""
    for span, blocks in _steps(out.numel()):
        rows = codes[span].float().view(-1, CODE_BLOCK_NUMEL) * _or_nan(scales[blocks])[:, None]
        out[span].add_(rows.view(-1))


def _or_nan(scales: torch.Tensor) -> torch.Tensor:
    """Return the scales, with NaN for those that are not finite: an infinite scale times a code of
    0 would hide some elements."""
    return torch.where(scales.isfinite(), scales, float("nan"))


def _steps(numel: int) -> Iterator[tuple[slice, slice]]:
    for start in range(0, numel, _STEP_NUMEL):
        stop = min(start + _STEP_NUMEL, numel)
        yield slice(start, stop), slice(start // CODE_BLOCK_NUMEL, stop // CODE_BLOCK_NUMEL)
