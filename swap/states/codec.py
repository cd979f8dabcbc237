"""A codec: a state may store fewer bytes than the model computes with."""

from __future__ import annotations

from typing import Protocol

import torch


class Codec(Protocol):
    """A stored format. The same stored bytes decode to the same bytes, wherever they are."""

    def stored_nbytes(self, nbytes: int) -> int:
        """Stored bytes of a buffer of `nbytes`. ValueError where it cannot be stored."""
        ...

    def encode(self, values: torch.Tensor, stored: torch.Tensor) -> None:
        """Fill `stored` from `values` (both 1D uint8). The values may be rounded. UnsupportedError
        for values that cannot be stored."""
        ...

    def update(self, values: torch.Tensor, stored: torch.Tensor) -> None:
        """Like `encode`, but codes in `stored` that decode to the new values already are kept, as
        far as parts of the buffer can be told apart. After an error, `stored` is unchanged."""
        ...

    def decode(self, stored: torch.Tensor, values: torch.Tensor) -> None:
        """Fill `values` by decoding `stored` (both 1D uint8)."""
        ...
