"""What the host tier holds of states that live on nvme, at its peak.

The permanent homes, staging buffers and the window of activations take their place in the host
arena before anything else; copies share what is left of it, one stretch of addresses:

    ├ window ┤├ staging ┤├ sums ┤├ homes of all groups ┤├──────────── copies ────────────┤

Copies are kept until their place is needed, so they grow to all that may ever be copied or to the
end of the budget. Between these two the peak depends on which sizes follow each other, so it is
taken from the simulated steps that also give the bytes moved (`traffic`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.planning.plan import Plan
from offload.planning.traffic import StepRun
from offload.tiers.ledger import StateClass
from offload.zero.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig


@dataclass(frozen=True)
class Copies:
    """The host tier's copies of what lives on nvme, at their peak. Bytes."""

    by_class: dict[StateClass, int]  # copies in host memory, when they are most
    touched_nbytes: int  # of host memory that copies have ever lain in
    staged: bool  # whether chunks pass through the staging buffers

    @property
    def nbytes(self) -> int:
        return sum(self.by_class.values())


def find_copies(
    plan: Plan, config: OffloadConfig, model: ModelShape, passes: int, room_nbytes: int
) -> Copies:
    """Copies in `room_nbytes` of host memory beside the homes there, in steps of `passes`."""
    if not plan.uses_nvme:
        return Copies({}, 0, staged=False)
    run = StepRun(plan, config, model, passes, room_nbytes)
    return Copies(run.host.most, run.host.high_water_nbytes, run.stages)
