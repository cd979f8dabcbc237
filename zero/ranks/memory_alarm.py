"""One rank is short of memory: all of them know it after a step, and stop at the same forward.

What a rank knows goes with the sums of squares of a step's norm, down the columns of a mesh and
then along its rows, so that every rank of it is told:

    Norms   ▶ among ranks with other data (`Ranks`) ▶ among those with other parts (TensorParallel)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch.distributed as dist

from offload.tiers.errors import LowMemoryError
from offload.tiers.units import format_bytes

_ENOUGH = -1.0


class MemoryAlarm:
    """Knows which rank is short of memory, as of the last step."""

    def __init__(self, left_nbytes: Callable[[], int | None]) -> None:
        """`left_nbytes()` returns the bytes left on this rank, if these are too few."""
        self._left_nbytes = left_nbytes
        self._known = _ENOUGH, 0.0  # bytes that are left, and on which rank

    def look(self) -> None:
        """Begin a round of exchanges with what is known here."""
        left = self._left_nbytes()
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._known = (_ENOUGH, 0.0) if left is None else (float(left), float(rank))

    def spread(
        self, exchange: Callable[[list[float]], np.ndarray], numbers: Sequence[float]
    ) -> np.ndarray:
        """Return `exchange(numbers)`, one row per rank; what each rank knows goes with them."""
        rows = exchange([*numbers, *self._known])
        for left, rank in rows[:, -2:].tolist():
            if left != _ENOUGH:
                self._known = left, rank
                break
        return rows[:, :-2]

    def check(self) -> None:
        """Raise LowMemoryError, on all ranks, once after each step in which one is short."""
        (left, rank), self._known = self._known, (_ENOUGH, 0.0)
        if left != _ENOUGH:
            raise LowMemoryError(
                f"rank {rank:.0f} has {format_bytes(int(left))} of RAM left, the kernel may kill "
                "it, and it has no copies left to give up; save a checkpoint, on all ranks, close "
                "other programs there, or go on with less memory: lower budget.host or the batch, "
                "or move a class to nvme",
                free_nbytes=int(left),
            )
