"""Floating-point formats of flat arrays, the checks on them, and how work is split.

NumPy has no bfloat16, so 16-bit floats travel as `uint16` arrays of their bits, and a `Float` tag
beside each array says which format the bits are in.

Every kernel takes a `Runner`: kernels own no threads. A runner gets a body and a count n, and calls
body(lo, hi) on disjoint ranges that cover range(n), in any order, from any threads, and returns
once all of them have returned. Bodies release the GIL. Which ranges a runner picks never changes a
bit of the result.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

NORM_BLOCK = 65536  # elements per partial sum of squares, of which a gradient's norm is the sum

Array = NDArray[Any]
Body = Callable[[int, int], None]
Runner = Callable[[Body, int], None]


class Float(IntEnum):
    """Format of the elements of an array; an IntEnum because its hash is the cheap one."""

    FP32 = 0
    BF16 = 1
    FP16 = 2

    @property
    def storage(self) -> np.dtype[Any]:
        """The NumPy dtype that carries this format: float32, or uint16 for the bits."""
        return _STORAGE[self]

    @property
    def nbytes(self) -> int:
        return self.storage.itemsize


_STORAGE = (np.dtype(np.float32), np.dtype(np.uint16), np.dtype(np.uint16))


def norm_blocks(numel: int) -> int:
    """The number of partial sums of squares of an array of `numel` elements."""
    return -(-numel // NORM_BLOCK)


def serial(body: Body, n: int) -> None:
    """The runner without threads: one call over the whole range."""
    body(0, n)


def check_output(name: str, array: Array, dtype: np.dtype[Any], numel: int) -> None:
    """Raise ValueError unless `array` is a writable, contiguous, aligned (numel,) of `dtype`."""
    if not (array.dtype == dtype and array.shape == (numel,) and array.flags.carray):
        _refuse(name, array, dtype, numel, writable=True)


def check_input(name: str, array: Array, dtype: np.dtype[Any], numel: int) -> None:
    """Raise ValueError unless `array` is a contiguous, aligned (numel,) of `dtype`."""
    if not (array.dtype == dtype and array.shape == (numel,) and array.flags.carray):
        _refuse(name, array, dtype, numel, writable=False)


def numel_of(name: str, array: Array) -> int:
    """Length of a 1-D array; ValueError for any other number of dimensions."""
    if array.ndim != 1:
        raise ValueError(f"{name}: expected a 1-D array, got shape {array.shape}")
    return array.shape[0]


def _refuse(name: str, array: Array, dtype: np.dtype[Any], numel: int, *, writable: bool) -> None:
    """Raise ValueError with the problem of `array`; return if it is only read-only, and may be."""
    if array.dtype != dtype:
        raise ValueError(f"{name}: expected dtype {dtype}, got {array.dtype}")
    if array.shape != (numel,):
        raise ValueError(f"{name}: expected shape ({numel},), got {array.shape}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: expected a contiguous array, got strides {array.strides}")
    if not array.flags.aligned:
        raise ValueError(f"{name}: expected {dtype.alignment}-byte alignment, got a start between")
    if writable and not array.flags.writeable:
        raise ValueError(f"{name}: expected a writable array, got a read-only one")
