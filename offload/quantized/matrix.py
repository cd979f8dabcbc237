"""A weight that its files hold quantized."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

_PIECE_NUMEL = 1 << 20


@dataclass(frozen=True)
class Matrix(ABC):
    """A weight [rows, columns], as in a linear layer. Its parts were checked when it was created:
    reading it allocates it and one piece, and fails only if a file cannot be read."""

    dtype: torch.dtype  # of the values
    shape: tuple[int, ...]

    @abstractmethod
    def fill(self, out: Tensor) -> None:
        """Dequantize the whole weight into `out`, a contiguous tensor of its shape and dtype."""

    def read(self, *, rounded: bool = True) -> Tensor:
        """Return the values: those that the format's own library computes, rounded to `dtype`; the
        files hold nothing more precise."""
        out = torch.empty(self.shape, dtype=self.dtype)
        self.fill(out)
        return out


def piece_rows(columns: int, multiple: int = 1) -> int:
    """Return the number of rows to dequantize at a time: a multiple of `multiple`."""
    return max(1, _PIECE_NUMEL // max(1, columns) // multiple) * multiple


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the codes [..., W, 32 / bits], uint8, in int32 words [..., W]: the lowest bits first.
    Codes have 4 or 8 bits."""
    octets = words.contiguous().view(-1).view(torch.uint8).reshape(*words.shape, 4)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Return int32 words [..., W] of codes [..., W * 32 / bits], uint8; `unpacked` reversed."""
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes.contiguous().view(-1).view(torch.int32).reshape(*codes.shape[:-1], -1)


@dataclass(frozen=True)
class Grouped:
    """A weight: a value is (code - zero point) x scale, rounded to the format of `scale`."""

    bits: int  # 4 or 8
    words: Tensor  # int32 [rows, columns x bits / 32]: the lowest bits first
    scale: Tensor  # [rows, groups]
    zeros: Tensor | None  # uint8 [rows, groups]; None: 2^(bits - 1) everywhere

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and columns."""
        rows, words = self.words.shape
        return rows, words * 32 // self.bits
