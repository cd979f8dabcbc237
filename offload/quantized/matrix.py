"""A weight that its files hold quantized."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.weights.tensor_file import Stored

_PIECE_NUMEL = 1 << 20
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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


@dataclass(frozen=True)
class Scaled(Matrix):
    """A weight whose blocks have a scale each: a value is (code - zero point) x scale, rounded to
    the format of the scales and then to `dtype`."""

    codes: Stored
    numbers: Callable[[Tensor], Tensor]  # that rows of codes stand for, exactly
    block: tuple[int, int]  # its rows and columns; those at the ends may have fewer
    scale: Callable[[], Tensor]  # one number per block
    zero: Callable[[], Tensor] | None = None
    group: Tensor | None = None  # of each column, where blocks are not of consecutive ones

    def fill(self, out: Tensor) -> None:
        rows, columns = self.shape
        scale = self.scale()
        zero = None if self.zero is None else self.zero().to(scale.dtype)
        step = piece_rows(columns)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            values = self.numbers(self.codes.rows(start, stop)).flatten(1)[:, :columns]
            values = values.to(scale.dtype)
            if zero is not None:
                values -= self._of_elements(zero, start, stop)
            out[start:stop] = values.mul_(self._of_elements(scale, start, stop))

    def _of_elements(self, numbers: Tensor, start: int, stop: int) -> Tensor:
        """Expand numbers of blocks to the elements of some rows."""
        rows, columns = self.block[0], min(self.block[1], self.shape[1])
        blocks = numbers.reshape(-(-self.shape[0] // rows), -1)
        here = blocks[torch.arange(start, stop) // rows]
        if self.group is not None:
            return here[:, self.group]
        return here.repeat_interleave(columns, dim=1)[:, : self.shape[1]]


@dataclass(frozen=True)
class Stack(Matrix):
    """Weights of one shape, one for each row of the first dimension: experts that files pack."""

    each: tuple[Matrix, ...]
    transposed: bool = False  # in the model the last two dimensions are the other way round

    @classmethod
    def of(cls, each: list[Matrix], *, transposed: bool = False) -> "Stack":
        """Create it; there is one weight at least."""
        first = each[0]
        return cls(first.dtype, (len(each), *first.shape), tuple(each), transposed)

    def fill(self, out: Tensor) -> None:
        for matrix, row in zip(self.each, out, strict=True):
            matrix.fill(row)


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


def e2m1(octets: Tensor) -> Tensor:
    """Return the numbers [..., 2 W] of FP4 codes, two in each byte [..., W]: the low bits first."""
    table = torch.tensor([*_E2M1, *(-each for each in _E2M1)])
    return table[torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2).int()]


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
