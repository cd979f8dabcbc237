"""How a page of keys and values lies in memory and in files.

A page is a fixed number of tokens of one layer: of every row of the batch and every head. As it is
computed (`PlainFormat`):

    keys    [batch, heads, tokens, dim]
    values  [batch, heads, tokens, dim]     from the next multiple of 64 bytes on

In 8 bits (`Int8Format`) each head's vector of a token is cut into groups of at most 128 elements.
A group has a scale s and an offset o in fp32, and a byte c per element:

    o = min(x)      s = (max(x) - o) / 255      c = round((x - o) / s), halves to even
    x' = c * s + o, in fp32, each operation rounded; then rounded to the format computed in

    codes     [batch, heads, tokens, dim]               of keys, then the same of values
    s and o   [batch, heads, tokens, groups, 2] fp32    behind them

The error is s / 2 and what rounding x' adds; a group of equal values has s = 0 and is exact. A
group with an infinity or a NaN reads as NaN. Rounding depends on the group's own values alone, so
neither page size nor batch, neither tier nor device changes a bit.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

import torch

from offload.tiers.units import round_up
from offload.zero.kv_sizes import groups_of, vector_nbytes

_ALIGNMENT = 64  # parts begin at its multiples: any dtype, any vector
_TOKENS_AT_ONCE = 256  # are encoded in one go: bounds what that takes beside the page


@dataclass(frozen=True)
class KVShape:
    """Of keys or of values: one row of the batch, one token."""

    heads: int
    dim: int
    dtype: torch.dtype  # as they are computed with

    @classmethod
    def of(cls, states: torch.Tensor, dtype: torch.dtype) -> KVShape:
        """Of `states` [batch, heads, tokens, dim]."""
        return cls(states.shape[1], states.shape[3], dtype)


@dataclass(frozen=True)
class PageFormat(abc.ABC):
    """A page of `tokens` tokens of `batch` rows, in `nbytes` bytes."""

    keys: KVShape
    values: KVShape
    batch: int
    tokens: int

    exact = True  # what is read is what was written

    @property
    def nbytes(self) -> int:
        return self._end(self.batch * self.tokens)

    def _end(self, vectors: int) -> int:
        """Bytes of so many vectors per head."""
        return sum(self._part_nbytes(shape, vectors) for shape in (self.keys, self.values))

    @classmethod
    def token_nbytes(cls, keys: KVShape, values: KVShape, batch: int) -> int:
        """What one token of all rows takes; in a page, alignment comes on top."""
        return sum(cls._vector_nbytes(shape) * shape.heads for shape in (keys, values)) * batch

    def _part_nbytes(self, shape: KVShape, vectors: int) -> int:
        return round_up(vectors * shape.heads * self._vector_nbytes(shape), _ALIGNMENT)

    @classmethod
    def _vector_nbytes(cls, shape: KVShape) -> int:
        """Of one token and head."""
        return vector_nbytes(shape.dim, shape.dtype.itemsize, int8=not cls.exact)

    def _parts(self, page: torch.Tensor) -> list[tuple[KVShape, torch.Tensor]]:
        """The bytes of keys and of values in `page` (1D uint8)."""
        vectors = self.batch * self.tokens
        middle = self._part_nbytes(self.keys, vectors)
        return [(self.keys, page[:middle]), (self.values, page[middle : self.nbytes])]

    def write(
        self, page: torch.Tensor, at: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:  # fmt: skip
        """Put tokens, [batch, heads, count, dim] of each, into `page` (1D uint8) from token `at`
        on."""
        for (shape, part), states in zip(self._parts(page), (keys, values), strict=True):
            self._write(shape, part, at, states)

    def read(
        self, page: torch.Tensor, span: slice, rows: torch.Tensor | None,
        keys: torch.Tensor | None, values: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Fill [batch, heads, count, dim] of each with the tokens `span` of `page`, of those
        `rows` of it; None: all of them in order. What is None is not wanted."""
        for (shape, part), states in zip(self._parts(page), (keys, values), strict=True):
            if states is not None:
                self._read(shape, part, span, rows, states)

    def copy(
        self, page: torch.Tensor, span: slice, rows: torch.Tensor | None, other: PageFormat,
        into: torch.Tensor,
    ) -> None:  # fmt: skip
        """Put the tokens `span` of `page` to the same place of another page of the same kind, which
        may be this one, as they are stored; of `rows` as in `read`."""
        for (shape, part), (_, to) in zip(self._parts(page), other._parts(into), strict=True):
            pairs = zip(self._stored(shape, part), other._stored(shape, to), strict=True)
            for source, target in pairs:
                some = source[:, :, span]
                some = some if rows is None else some.index_select(0, rows)
                target[:, :, span] = some

    @abc.abstractmethod
    def _stored(self, shape: KVShape, part: torch.Tensor) -> list[torch.Tensor]:
        """What `part` consists of: views [batch, heads, tokens, ...]."""

    @abc.abstractmethod
    def _write(
        self, shape: KVShape, part: torch.Tensor, at: int, states: torch.Tensor
    ) -> None: ...

    @abc.abstractmethod
    def _read(
        self, shape: KVShape, part: torch.Tensor, span: slice, rows: torch.Tensor | None,
        states: torch.Tensor,
    ) -> None: ...  # fmt: skip

    @abc.abstractmethod
    def rounded(self, states: torch.Tensor, into: torch.Tensor) -> None:
        """Fill `into` with what reading `states` would give, once written."""

    def _view(
        self, part: torch.Tensor, shape: KVShape, *last: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """[batch, heads, tokens, *last] of `dtype`, at the beginning of `part`."""
        sizes = (self.batch, shape.heads, self.tokens, *last)
        return part[: math.prod(sizes) * dtype.itemsize].view(dtype).view(sizes)


class PlainFormat(PageFormat):
    """Keys and values as they are computed."""

    def _stored(self, shape: KVShape, part: torch.Tensor) -> list[torch.Tensor]:
        return [self._view(part, shape, shape.dim, dtype=shape.dtype)]

    def _write(self, shape: KVShape, part: torch.Tensor, at: int, states: torch.Tensor) -> None:
        (whole,) = self._stored(shape, part)
        whole[:, :, at : at + states.shape[2]] = states

    def _read(
        self, shape: KVShape, part: torch.Tensor, span: slice, rows: torch.Tensor | None,
        states: torch.Tensor,
    ) -> None:  # fmt: skip
        (whole,) = self._stored(shape, part)
        some = whole[:, :, span]
        states.copy_(some if rows is None else some.index_select(0, rows))

    def rounded(self, states: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(states)


class Int8Format(PageFormat):
    """A byte per element, with a scale and an offset per group of a head's vector."""

    exact = False

    def _stored(self, shape: KVShape, part: torch.Tensor) -> list[torch.Tensor]:
        """Codes [batch, heads, tokens, groups, group]; scales and offsets [..., groups, 2]."""
        groups = groups_of(shape.dim)
        codes = self._view(part, shape, groups, shape.dim // groups, dtype=torch.uint8)
        behind = part[round_up(codes.numel(), 4) :]
        return [codes, self._view(behind, shape, groups, 2, dtype=torch.float32)]

    def _part_nbytes(self, shape: KVShape, vectors: int) -> int:
        count = vectors * shape.heads
        scales = 8 * count * groups_of(shape.dim)
        return round_up(round_up(count * shape.dim, 4) + scales, _ALIGNMENT)

    def _write(self, shape: KVShape, part: torch.Tensor, at: int, states: torch.Tensor) -> None:
        codes, scales = self._stored(shape, part)
        for start in range(0, states.shape[2], _TOKENS_AT_ONCE):
            some = states[:, :, start : start + _TOKENS_AT_ONCE]
            span = slice(at + start, at + start + some.shape[2])
            found, scale, offset = _encode(_grouped(some, shape))
            codes[:, :, span] = found
            scales[:, :, span, :, 0] = scale
            scales[:, :, span, :, 1] = offset

    def _read(
        self, shape: KVShape, part: torch.Tensor, span: slice, rows: torch.Tensor | None,
        states: torch.Tensor,
    ) -> None:  # fmt: skip
        codes, scales = (whole[:, :, span] for whole in self._stored(shape, part))
        if rows is not None:
            codes, scales = codes.index_select(0, rows), scales.index_select(0, rows)
        for start in range(0, states.shape[2], _TOKENS_AT_ONCE):
            some = slice(start, start + _TOKENS_AT_ONCE)
            pair = scales[:, :, some]
            found = _decode(codes[:, :, some], pair[..., 0], pair[..., 1])
            states[:, :, some] = found.flatten(-2)

    def rounded(self, states: torch.Tensor, into: torch.Tensor) -> None:
        shape = KVShape.of(states, into.dtype)
        for start in range(0, states.shape[2], _TOKENS_AT_ONCE):
            some = slice(start, start + _TOKENS_AT_ONCE)
            into[:, :, some] = _decode(*_encode(_grouped(states[:, :, some], shape))).flatten(-2)


def _grouped(states: torch.Tensor, shape: KVShape) -> torch.Tensor:
    """[..., groups, group] in fp32, of values that were first rounded as they are computed with."""
    exact = states.to(shape.dtype).float()
    return exact.view(*exact.shape[:-1], groups_of(shape.dim), -1)


def _encode(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and offsets of groups [..., group] in fp32."""
    offset, largest = groups.aminmax(dim=-1)
    scale = (largest - offset) / 255
    step = torch.where(scale == 0, 1, scale)
    codes = groups.sub(offset[..., None]).div_(step[..., None]).round_().clamp_(0, 255)
    return codes.nan_to_num_(0).to(torch.uint8), scale, offset


def _decode(codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Groups [..., group] in fp32."""
    return codes.float().mul_(scale[..., None]).add_(offset[..., None])
