"""A weight in codes whose groups are parts of rows, before a format packs them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.scale.shape[1]
