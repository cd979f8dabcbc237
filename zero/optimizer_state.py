"""What is kept of one group for its optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from offload.kernels.floats import Array
from offload.swap.state import State
from offload.zero.gradients import GradientAccumulator
from offload.zero.group import ParamGroup
from offload.zero.records import RecordFormat


@dataclass(slots=True)
class OptimizerState:
    """What is kept of one group: a record per chunk of its trainable part."""

    group: ParamGroup
    gradients: GradientAccumulator
    chunks: list[range]
    records: list[State]
    formats: list[RecordFormat]  # of the records
    steps: Array  # int64, per trainable parameter: how often it was updated

    @property
    def in_place(self) -> bool:
        """True if nothing of this group ever moves."""
        states = (self.group.state, self.gradients.state, *self.records)
        return all(state.in_place for state in states)
