"""A weight whose files hold codes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

_PIECE_NUMEL = 1 << 20


@dataclass(frozen=True)
class Matrix(ABC):
    """A weight [rows, columns], as a linear layer has it. Its parts were checked when it was made:
    reading it allocates it and a piece, and fails only as files fail."""

    dtype: torch.dtype  # of the values
    shape: tuple[int, ...]

    @abstractmethod
    def fill(self, out: Tensor) -> None:
        """Decode all of it into `out`, a contiguous tensor of its shape and dtype."""

    def read(self, *, rounded: bool = True) -> Tensor:
        """The values: what the format's own library computes with is rounded to `dtype`, and
        nothing more precise is in the files."""
        out = torch.empty(self.shape, dtype=self.dtype)
        self.fill(out)
        return out


def piece_rows(columns: int, multiple: int = 1) -> int:
    """How many rows are decoded at a time: a multiple of `multiple`."""
    return max(1, _PIECE_NUMEL // max(1, columns) // multiple) * multiple


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Codes [..., W, 32 / bits], uint8, of int32 words [..., W]: the lowest bits first. 4 or 8
    bits."""
    octets = words.contiguous().view(-1).view(torch.uint8).reshape(*words.shape, 4)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def packed(codes: Tensor, bits: int) -> Tensor:
    """The reverse: int32 words [..., W] of codes [..., W * 32 / bits], uint8."""
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes.contiguous().view(-1).view(torch.int32).reshape(*codes.shape[:-1], -1)
