"""The bytes of keys and values, before there are any."""

from dataclasses import dataclass

from offload.tiers.units import round_up

_GROUPS = (128, 64, 32)
_WORD_NBYTES = 4  # a scale per group


def padded_dim(dim: int) -> int:
    """Return the elements of a head's vector in 8 bits: `dim`, and zeros up to whole groups."""
    return round_up(dim, _GROUPS[-1])


def group_of(dim: int) -> int:
    """Return how many elements of such a vector share a scale: the largest group that fits."""
    return next(size for size in _GROUPS if not padded_dim(dim) % size)


def vector_nbytes(dim: int, itemsize: int, *, int8: bool) -> int:
    """Return the bytes of one head's key or value of one token, as it is stored."""
    padded = padded_dim(dim)
    return padded + _WORD_NBYTES * (padded // group_of(dim)) if int8 else dim * itemsize


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """The keys and values that a layer's cache holds of one sequence."""

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # tokens that attention sees; None: all

    @property
    def token_numel(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)

    def token_nbytes(self, itemsize: int, *, int8: bool = False) -> int:
        """Return the bytes of one token, as it is stored."""
        dims = (self.key_dim, self.value_dim)
        return self.heads * sum(vector_nbytes(dim, itemsize, int8=int8) for dim in dims)
