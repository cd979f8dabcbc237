"""The format of a page of keys and values in memory and in files.

A page is a fixed number of tokens of one layer: of every row of the batch and every head. As it is
computed:

    keys    [batch, heads, tokens, dim]
    values  [batch, heads, tokens, dim]     from the next multiple of 64 bytes on

In 8 bits each head's vector of a token is cut into groups of 128, 64 or 32 elements,
the largest size that divides it; where none does, zeros follow up to a multiple of 32. A group has
a 32-bit word and a code per element, those of INT8 in `kernels.cpu.quantization`: x' = q * s, with
s = max(|x|) / 127 and q = round(x / s).

    words     [batch, heads, tokens, groups] uint32     of keys, then the same of values
    codes     [batch, heads, tokens, groups, size]      behind them

The error is at most s / 2, and what rounding x' to the model's format adds; zeros stay zeros. A
group with an infinity or a NaN reads as NaN. Rounding depends on the group's own values alone, so
neither page size nor batch, neither tier nor device changes a bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from offload.tiers.cached_layer import group_of, padded_dim, vector_nbytes
from offload.tiers.units import round_up

_ALIGNMENT = 64  # parts begin at its multiples: any dtype, any vector
_TOKENS_AT_ONCE = 256  # are quantized in one go: bounds what that takes beside the page
_SCALE_MASK = -128  # clears the low 7 of a scale's fp32 bits
_MIN_SCALE = 2.0**-100
_NAN_BITS = 0x7FC00000


@dataclass(frozen=True)
class KVShape:
    """The shape of keys or of values: one row of the batch, one token."""

    heads: int
    dim: int
    dtype: torch.dtype  # as they are computed with

    @classmethod
    def of(cls, states: torch.Tensor, dtype: torch.dtype) -> KVShape:
        """Return the shape of `states` [batch, heads, tokens, dim]."""
        return cls(states.shape[1], states.shape[3], dtype)


@dataclass(frozen=True)
class PageFormat:
    """A page of `tokens` tokens of `batch` rows, in `nbytes` bytes."""

    keys: KVShape
    values: KVShape
    batch: int
    tokens: int
    int8: bool = False  # else what is read is what was written

    @property
    def nbytes(self) -> int:
        vectors = self.batch * self.tokens
        return sum(self._part_nbytes(shape, vectors) for shape in (self.keys, self.values))

    @property
    def token_nbytes(self) -> int:
        """Bytes that one token of all rows takes; in a page, alignment comes on top."""
        vectors = (self._vector_nbytes(each) * each.heads for each in (self.keys, self.values))
        return sum(vectors) * self.batch

    def _part_nbytes(self, shape: KVShape, vectors: int) -> int:
        return round_up(vectors * shape.heads * self._vector_nbytes(shape), _ALIGNMENT)

    def _vector_nbytes(self, shape: KVShape) -> int:
        """Return the bytes of one token and head."""
        return vector_nbytes(shape.dim, shape.dtype.itemsize, int8=self.int8)

    def write(self, page: torch.Tensor, at: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put tokens, [batch, heads, count, dim] of each, into `page` (1D uint8) from token `at`
        on."""
        for (shape, part), states in zip(self._parts(page), (keys, values), strict=True):
            stored = self._stored(shape, part)
            for span in self._spans(states.shape[2]):
                into = slice(at + span.start, at + span.stop)
                for whole, some in zip(
                    stored, self._quantize(shape, states[:, :, span]), strict=True
                ):
                    whole[:, :, into] = some

    def read(
        self, page: torch.Tensor, span: slice, rows: torch.Tensor | None,
        keys: torch.Tensor | None, values: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Fill [batch, heads, count, dim] of each with the tokens `span` of `page`, of those `rows`
        of it; None: all of them in order. Keys or values that are None are not read."""
        for (shape, part), states in zip(self._parts(page), (keys, values), strict=True):
            if states is not None:
                stored = (_chosen(each, span, rows) for each in self._stored(shape, part))
                states.copy_(self._dequantize(shape, *stored))

    def copy(
        self, page: torch.Tensor, span: slice, rows: torch.Tensor | None, into: torch.Tensor
    ) -> None:
        """Put the tokens `span` of `page` to the same place of another page, which may be this one,
        as they are stored; of `rows` as in `read`."""
        for (shape, part), (_, to) in zip(self._parts(page), self._parts(into), strict=True):
            pairs = zip(self._stored(shape, part), self._stored(shape, to), strict=True)
            for source, target in pairs:
                target[:, :, span] = _chosen(source, span, rows)

    def rounded(self, states: torch.Tensor, into: torch.Tensor) -> None:
        """Fill `into` with the values that reading `states` would give, once written."""
        shape = KVShape.of(states, into.dtype)
        for span in self._spans(states.shape[2]):
            into[:, :, span] = self._dequantize(shape, *self._quantize(shape, states[:, :, span]))

    # ---------------------------------------------------------------- how it is stored
    def _parts(self, page: torch.Tensor) -> list[tuple[KVShape, torch.Tensor]]:
        """Return the bytes of keys and of values in `page` (1D uint8)."""
        middle = self._part_nbytes(self.keys, self.batch * self.tokens)
        return [(self.keys, page[:middle]), (self.values, page[middle : self.nbytes])]

    def _stored(self, shape: KVShape, part: torch.Tensor) -> list[torch.Tensor]:
        """Return the views [batch, heads, tokens, ...] that `part` consists of: the states, or
        words [..., groups] and codes [..., padded dim]."""
        if not self.int8:
            return [self._view(part, shape, shape.dim, dtype=shape.dtype)]
        padded = padded_dim(shape.dim)
        words = self._view(part, shape, padded // group_of(shape.dim), dtype=torch.int32)
        behind = part[words.numel() * words.itemsize :]
        return [words, self._view(behind, shape, padded, dtype=torch.uint8)]

    def _view(
        self, part: torch.Tensor, shape: KVShape, last: int, *, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return [batch, heads, tokens, last] of `dtype`, at the beginning of `part`."""
        sizes = (self.batch, shape.heads, self.tokens, last)
        return part[: math.prod(sizes) * dtype.itemsize].view(dtype).view(sizes)

    def _spans(self, tokens: int) -> Iterator[slice]:
        """Yield the spans of tokens that are quantized in one go."""
        step = _TOKENS_AT_ONCE if self.int8 else max(tokens, 1)
        for start in range(0, tokens, step):
            yield slice(start, min(start + step, tokens))

    def _quantize(self, shape: KVShape, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return vectors [..., dim] as they are stored; words and codes are of vectors that were
        rounded to the model's format first."""
        if not self.int8:
            return (states,)
        padded, size = padded_dim(shape.dim), group_of(shape.dim)
        values = functional.pad(states.to(shape.dtype), (0, padded - shape.dim)).contiguous()
        words = values.new_empty((*values.shape[:-1], padded // size), dtype=torch.int32)
        codes = torch.empty_like(values, dtype=torch.uint8)
        quantize_int8(values, words, codes)
        return words, codes

    def _dequantize(self, shape: KVShape, *stored: torch.Tensor) -> torch.Tensor:
        """Return the vectors [..., dim]."""
        if not self.int8:
            return stored[0]
        words, codes = stored
        values = torch.empty_like(codes, dtype=shape.dtype)
        dequantize_int8(words.contiguous(), codes.contiguous(), values)
        return values[..., : shape.dim]


def _chosen(stored: torch.Tensor, span: slice, rows: torch.Tensor | None) -> torch.Tensor:
    some = stored[:, :, span]
    return some if rows is None else some.index_select(0, rows)


def quantize_int8(values: torch.Tensor, words: torch.Tensor, codes: torch.Tensor) -> None:
    """Quantize as `quantize_weights` does, by operations of torch on any device."""
    groups = values.float().view(*words.shape, -1)
    largest = groups.abs().amax(dim=-1)
    scales = (largest / 127).view(torch.int32) & _SCALE_MASK
    scales = scales.view(torch.float32).clamp(min=_MIN_SCALE)
    whole = torch.isfinite(largest)
    words.copy_(scales.view(torch.int32).where(whole, _NAN_BITS))
    levels = (groups / scales[..., None]).round().where(whole[..., None], 0)
    codes.copy_(levels.to(torch.int8).view(torch.uint8).view(codes.shape))


def dequantize_int8(words: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
    """Dequantize as `dequantize_weights` does, by operations of torch on any device."""
    groups = codes.view(torch.int8).float().view(*words.shape, -1)
    values.copy_(groups.mul_(words.view(torch.float32)[..., None]).view(values.shape))
