"""What the host tier holds of states that live on nvme: one short run of the runtime's own rules,
without bytes.

The permanent homes, staging buffers and the window of activations take their place in the host
arena before anything else; copies share what is left of it, one stretch of addresses:

    ├ window ┤├ staging ┤├ sums ┤├ homes of all groups ┤├──────────── copies ────────────┤

Copies are kept until somebody needs their place, so they grow to all that may ever be copied or to
the end of the budget. Between these two the peak is a matter of which sizes follow each other, so
loading and the first steps are gone through with the same arena (`tiers/arena.py`), the same trace
(`swap/trace.py`) and the same choice of what to give up as in a run; moves take no time.

    load       every group: its parameters, its records
    forward    a unit's parameters, and those that the trace expects next
    backward   the same in reverse, and the group's gradients
    update     parameters and records where there is room, gradients are given back; behind the
               rest of the backward one group late, the one whose gradients are just arriving

Where there are too many pieces for that to be quick, each is small against the whole, and the room
is taken to be filled to the end.
"""

from __future__ import annotations

from offload.planning.copy_simulation import Simulation
from offload.planning.copy_totals import ONE_LATE, Copies, Run, nvme_totals
from offload.planning.plan import Plan
from offload.tiers.extent import TierName
from offload.tiers.ledger import StateClass
from offload.zero.model_shape import ModelShape

MOST_PIECES = 400  # more: each is small against the whole, and a run of them would take seconds


def find_copies(plan: Plan, model: ModelShape, run: Run, room_nbytes: int) -> Copies:
    """Copies in `room_nbytes` of host memory beside the homes there."""
    pieces = _count(plan, run)
    if not pieces:
        return Copies({}, 0, False)
    if pieces > MOST_PIECES:
        return _filled(plan, run, room_nbytes)
    simulation = Simulation(plan, model, run, room_nbytes)
    simulation.run()
    return simulation.found()


def _count(plan: Plan, run: Run) -> int:
    records = sum(tiers.count(TierName.NVME) for tiers in plan.records)
    gradients = 0 if run.sums else plan.gradients.count(TierName.NVME)
    return plan.parameters.count(TierName.NVME) + gradients + records


def _filled(plan: Plan, run: Run, room_nbytes: int) -> Copies:
    """Without going through steps: all that may be copied, or all the room."""
    copied = nvme_totals(plan, run)
    gradients = [
        group.gradients for index, group in enumerate(plan.groups)
        if plan.gradients[index] is TierName.NVME and not run.sums
    ]  # fmt: skip
    if run.in_backward:
        copied[StateClass.GRADIENTS] = sum(sorted(gradients)[-1 - ONE_LATE :])
    held, left = {}, room_nbytes
    for state_class in (StateClass.PARAMETERS, StateClass.GRADIENTS, StateClass.OPTIMIZER):
        held[state_class] = min(copied[state_class], left)
        left -= held[state_class]
    return Copies(held, sum(held.values()), staged=not left)
