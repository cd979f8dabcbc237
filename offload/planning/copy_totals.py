"""What copies of nvme state come to: of `copies`, and of the simulation behind it."""

from __future__ import annotations

from dataclasses import dataclass

from offload.planning.plan import Plan
from offload.planning.plan_sizes import record_kinds
from offload.tiers.extent import TierName
from offload.tiers.ledger import StateClass

# Groups whose update within backward is not over when the next gradients arrive. None or two
# happen, too, by how fast an update is beside the backward of a group.
ONE_LATE = 1


@dataclass(frozen=True)
class Copies:
    """The host tier's copies of what lives on nvme, at their peak. Bytes."""

    by_class: dict[StateClass, int]  # copies in host memory, when they are most
    touched_nbytes: int  # of host memory that copies have ever lain in
    staged: bool  # whether chunks pass through the staging buffers

    @property
    def nbytes(self) -> int:
        return sum(self.by_class.values())


@dataclass(frozen=True)
class Run:
    """How the steps are taken."""

    passes: int = 1  # backward passes per step
    in_backward: bool = False
    sums: bool = False  # several passes add up to fp32 sums, which are never on nvme
    itemsize: int = 4  # of a parameter


def nvme_totals(plan: Plan, run: Run) -> dict[StateClass, int]:
    """At home on nvme, by class."""
    totals = dict.fromkeys((StateClass.PARAMETERS, StateClass.GRADIENTS, StateClass.OPTIMIZER), 0)
    for index, group in enumerate(plan.groups):
        if plan.parameters[index] is TierName.NVME:
            totals[StateClass.PARAMETERS] += group.parameters
        if plan.gradients[index] is TierName.NVME and not run.sums:
            totals[StateClass.GRADIENTS] += group.gradients
        for kind in record_kinds(group, plan.records[index], plan.chunk_numel):
            if kind.tier is TierName.NVME:
                totals[StateClass.OPTIMIZER] += kind.nbytes * kind.count
    return totals
