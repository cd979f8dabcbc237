"""The bytes that a step moves over every link, by action, and the copies that host memory holds
meanwhile: of a step in a long run (`planned_run`), activations included.

Copies are kept until their place is needed, so they grow to all that may ever be copied or to the
end of the budget. Between these two their peak depends on which sizes follow each other, and is
taken from the planned steps, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from offload.planning.plan.kv_plan import KVHeld
from offload.planning.plan.plan import Plan, tried_groups
from offload.planning.step.planned_run import PlannedRun
from offload.planning.step.program import (
    Action,
    Bytes,
    Move,
    Verb,
    write_program,
)
from offload.planning.step.representatives import Representatives, representatives
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig
    from offload.planning.activations.facts import ActivationFacts
    from offload.planning.plan.workload import Workload

_MOST_CHUNKS_HELD = 1000  # whose copies are looked at one by one where no bytes are asked for
_MOST_COPIED = 2048  # groups whose copies are looked at one by one
_REQUEST_NBYTES = 2 << 20  # of one request: storages differ, pieces are at least that long


@dataclass(frozen=True)
class StepTraffic:
    """The moves of one step in a long run."""

    moves: tuple[Move, ...]  # of actions of representatives
    experts: Representatives
    total: Bytes = field(default_factory=Bytes)


def step_traffic(
    plan: Plan, config: OffloadConfig, model: ModelShape, facts: ActivationFacts | None,
    workload: Workload,
) -> StepTraffic:  # fmt: skip
    """The bytes of one step. Without `facts`, activations are left out."""
    experts = representatives(plan, model, workload)
    room = plan.budgets[Tier.HOST] - plan.total(Tier.HOST)
    run = PlannedRun(
        plan, config, experts, workload.passes, room, None if facts is None else facts.kv,
    )  # fmt: skip
    tried = tried_groups(plan, config)
    actions = write_program(config, experts.model, workload.passes, tried).actions
    moves = _all_passes(run.moves, actions)
    if facts is not None:
        add_activations(plan, experts.model, facts, moves)
    total = Bytes()
    for move in moves:
        total.add(move.nbytes)
    return StepTraffic(tuple(moves), experts, total)


def _all_passes(moves: Sequence[Move], actions: Sequence[Action]) -> list[Move]:
    """The moves of a step of `actions`: passes that were not simulated are like the second one."""
    few, many = moves[-1].action.number, actions[-1].number
    by_pass: dict[int, list[Move]] = defaultdict(list)
    for move in moves:
        by_pass[move.action.number].append(move)
    same = [
        move for number in range(many + 1)
        for move in by_pass[few if number == many else min(number, 1)]
    ]  # fmt: skip
    return [
        Move(action, replace(move.nbytes), move.fetches)
        for action, move in zip(actions, same, strict=True)
    ]


def add_activations(
    plan: Plan, model: ModelShape, facts: ActivationFacts, moves: Sequence[Move]
) -> None:
    """Add the moves of saved activations, which leave during forward and return during backward.

    On nvme half of the window is never written, and what is still in the window is not read.
    """
    activations = plan.activations
    if activations is None:
        return
    parked = facts.saved_nbytes
    window = activations.window_nbytes
    written = read = 0
    if activations.tier is Tier.NVME:
        written = min(max(0, parked - window // 2), activations.disk_nbytes)
        read = max(0, min(written, parked - window))
    elif plan.gpu:
        parked = min(parked, window)
    for verb in (Verb.FORWARD, Verb.BACKWARD):
        chosen = [move for move in moves if move.action.verb is verb]
        blocks = {group for unit in model.units if unit.repeated for group in unit.groups}
        inside = [move for move in chosen if move.action.group in blocks] or chosen
        passes = max(move.action.number for move in inside) + 1 if inside else 1
        share = max(1, len(inside)) // passes or 1
        for index, move in enumerate(inside):
            part = index % share
            across = _part(parked, part, share) if plan.gpu else 0
            if verb is Verb.FORWARD:
                leaving = Bytes(written=_part(written, part, share), to_host=across)
            else:
                leaving = Bytes(read=_part(read, part, share), to_device=across)
            leaving.requests = -(-(leaving.read + leaving.written) // _REQUEST_NBYTES)
            move.nbytes.add(leaving)


def _part(nbytes: int, index: int, count: int) -> int:
    """Return part `index` of `nbytes` in `count` whole parts that add up."""
    return nbytes * (index + 1) // count - nbytes * index // count


@dataclass(frozen=True)
class PeakCopies:
    """The host tier's copies of states on nvme or in codes, at their peak, in bytes."""

    by_class: dict[StateClass, int]  # copies in host memory, when they are most
    touched_nbytes: int  # of host memory that copies have ever lain in
    staged: bool  # whether chunks pass through the staging buffers

    @property
    def nbytes(self) -> int:
        return sum(self.by_class.values())


def find_copies(
    plan: Plan, config: OffloadConfig, model: ModelShape, passes: int, room_nbytes: int,
    kv: KVHeld | None = None,
) -> PeakCopies:  # fmt: skip
    """Find the copies in `room_nbytes` of host memory beside the homes there, in steps of `passes`.
    In a long run every expert is touched and leaves copies."""
    if not plan.copies_on_host:
        return PeakCopies({}, 0, staged=False)
    experts = representatives(plan, model, None, _MOST_COPIED)
    run = PlannedRun(
        plan, config, experts, passes, room_nbytes, kv, most_chunks=_MOST_CHUNKS_HELD
    )  # fmt: skip
    memory = run.states.memory
    return PeakCopies(memory.peak, memory.arena.high_water_nbytes, run.stages)
