"""Bytes of keys and values, before there are any."""

from __future__ import annotations

from dataclasses import dataclass

_LARGEST_GROUP = 128
_GROUP_NBYTES = 8  # a scale and an offset in fp32


def groups_of(dim: int) -> int:
    """Groups that a head's vector of `dim` elements is cut into, in 8 bits: the fewest of at most
    128 that are equally long."""
    fewest = max(1, -(-dim // _LARGEST_GROUP))
    return next(count for count in range(fewest, dim + 1) if not dim % count)


def vector_nbytes(dim: int, itemsize: int, *, int8: bool) -> int:
    """Of one head's key or value of one token, as it is stored."""
    return dim + _GROUP_NBYTES * groups_of(dim) if int8 else dim * itemsize


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """A layer whose keys and values are kept, of one sequence."""

    heads: int
    key_dim: int
    value_dim: int

    def token_nbytes(self, itemsize: int, *, int8: bool = False) -> int:
        """Of one token, as it is stored."""
        dims = (self.key_dim, self.value_dim)
        return self.heads * sum(vector_nbytes(dim, itemsize, int8=int8) for dim in dims)
