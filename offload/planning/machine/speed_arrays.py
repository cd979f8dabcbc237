"""The arrays that all systems of a bench share, placed so that none has more favourable pages.

Arrays whose starts differ by a large power of two compete for the same cache sets and DRAM banks:
measured, that costs a third to a half of the bandwidth. So each starts some pages and cache lines
later than the one before:

    ├ array 0 ┤   ├ array 1 ┤      ├ array 2 ┤
    0             n + 1 x STAGGER  2 n + 2 x STAGGER
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offload.tiers.memory import HostMemory
from offload.tiers.units import round_up

STAGGER_NBYTES = 66_624  # 16 pages and 17 cache lines
_HUGE_PAGE_NBYTES = 2 << 20

Array = NDArray[Any]


@dataclass(frozen=True)
class Stream:
    """One array as a pass reads or updates it."""

    name: str
    dtype: str  # of NumPy
    updated: bool = True  # read and written back; else only read
    elements_each: int = 1  # parameters that share one element

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def traffic(self) -> float:
        """The bytes per parameter of one pass."""
        return self.itemsize * (2 if self.updated else 1) / self.elements_each


class Arrays:
    """Arrays by name, `numel` parameters long, filled at the first request.

    Room is reserved for `streams`; requests for others raise ValueError.
    """

    def __init__(self, numel: int, streams: Sequence[Stream]) -> None:
        self.numel = numel
        unique = {stream.name: stream for stream in streams}
        self._planned = {name: stream.dtype for name, stream in unique.items()}
        count = len(unique)
        nbytes = sum(map(self._nbytes, unique.values()))
        self._memory = HostMemory(nbytes + count * (_HUGE_PAGE_NBYTES + STAGGER_NBYTES * count))
        self._end = 0
        self._made: dict[str, Array] = {}

    def _nbytes(self, stream: Stream) -> int:
        return -(-self.numel // stream.elements_each) * stream.itemsize

    def get(self, stream: Stream, fill: Callable[[Array], None]) -> Array:
        """The array of `stream`, 1D. The first request sets, and touches, all of it by
        `fill(array)`."""
        if self._planned.get(stream.name) != stream.dtype:
            raise ValueError(f"{stream.name} ({stream.dtype}) was not among the arrays planned for")
        if stream.name not in self._made:
            self._made[stream.name] = self._make(stream, fill)
        return self._made[stream.name]

    def _make(self, stream: Stream, fill: Callable[[Array], None]) -> Array:
        start = round_up(self._end, _HUGE_PAGE_NBYTES) + len(self._made) * STAGGER_NBYTES
        nbytes = self._nbytes(stream)
        self._end = start + nbytes
        made: Array = self._memory.tensor(start, nbytes).numpy().view(stream.dtype)
        fill(made)
        return made


def tensor_of(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """Return a 1D tensor of `dtype` over the memory of `array`; both have the same item size."""
    return torch.from_numpy(array.view(np.uint8)).view(dtype)
