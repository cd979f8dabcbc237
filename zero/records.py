"""What the optimizer keeps of one chunk of a group: one contiguous record, one move.

    ├ exp_avg fp32 ┤├ exp_avg_sq fp32 ┤├ remainder int16, or master fp32 ┤├ max_exp_avg_sq ┤

Each array is shifted by some cache lines more than the one before: arrays a power of two apart
compete for the same cache sets.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from offload.kernels.floats import Array
from offload.tiers.units import round_up

_STAGGER_NBYTES = 17 * 64


class Master(enum.StrEnum):
    """How the full-precision weight is kept."""

    NONE = "none"  # the parameter is fp32 itself
    SPLIT = "split"  # bf16 weight + 16-bit remainder, lossless
    FP32 = "fp32"  # a copy of its own


@dataclass(frozen=True)
class RecordFormat:
    """Which arrays a record has."""

    master: Master
    amsgrad: bool = False

    @cached_property
    def fields(self) -> tuple[tuple[str, np.dtype[np.generic]], ...]:
        fp32: np.dtype[np.generic] = np.dtype(np.float32)
        int16: np.dtype[np.generic] = np.dtype(np.int16)
        fields = [("exp_avg", fp32), ("exp_avg_sq", fp32)]
        if self.master is Master.SPLIT:
            fields.append(("low", int16))
        if self.master is Master.FP32:
            fields.append(("master", fp32))
        if self.amsgrad:
            fields.append(("max_exp_avg_sq", fp32))
        return tuple(fields)

    def _offsets(self, numel: int) -> list[int]:
        offsets, end = [], 0
        for index, (_, dtype) in enumerate(self.fields):
            start = round_up(end, 64) + (_STAGGER_NBYTES if index else 0)
            offsets.append(start)
            end = start + numel * dtype.itemsize
        return [*offsets, end]

    def nbytes(self, numel: int) -> int:
        """Bytes of a record of `numel` elements."""
        return self._offsets(numel)[-1]

    def arrays(self, record: torch.Tensor, numel: int) -> dict[str, Array]:
        """Views of a record (1D uint8 host memory), each `numel` long."""
        buffer = record.numpy()
        offsets = self._offsets(numel)
        return {
            name: buffer[start : start + numel * dtype.itemsize].view(dtype)
            for (name, dtype), start in zip(self.fields, offsets[:-1], strict=True)
        }
