"""The bytes that a step moves over every link, by action: of a step in a long run (`planned_run`),
with saved activations and KV caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from offload.planning.plan.plan import Plan
from offload.planning.step.planned_run import PlannedRun
from offload.planning.step.program import Bytes, Move, Verb
from offload.planning.step.representatives import representatives
from offload.tiers.tier import Tier
from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig
    from offload.planning.activations.facts import ActivationFacts
    from offload.planning.plan.kv_plan import KVPlan
    from offload.planning.plan.workload import Workload


def step_traffic(
    plan: Plan, config: OffloadConfig, model: ModelShape, facts: ActivationFacts | None,
    workload: Workload,
) -> PlannedRun:  # fmt: skip
    """The moves of one step of at most `MOST_PASSES`. Without `facts`, those of states alone."""
    experts = representatives(plan, model, workload)
    run = PlannedRun(plan, config, experts, workload.passes)
    if facts is not None:
        _add_activations(plan, experts.model, facts.saved_nbytes, run.moves)
        if plan.kv is not None:
            _add_caches(plan, plan.kv, run, workload)
    return run


def _add_activations(
    plan: Plan, model: ModelShape, saved_nbytes: int, moves: Sequence[Move]
) -> None:
    """Add saved activations, which leave during forward and return during backward.

    On nvme half of the window is never written, and what is still in the window is not read.
    """
    activations = plan.activations
    if activations is None:
        return
    window, across, written, read = activations.window_nbytes, 0, 0, 0
    if activations.tier is Tier.NVME:
        written = min(max(0, saved_nbytes - window // 2), activations.disk_nbytes)
        read = max(0, min(written, saved_nbytes - window))
    if plan.gpu:
        across = saved_nbytes if activations.tier is Tier.NVME else min(saved_nbytes, window)
    _spread(Bytes(written=written, to_host=across), Verb.FORWARD, model, moves)
    _spread(Bytes(read=read, to_device=across), Verb.BACKWARD, model, moves)


def _add_caches(plan: Plan, kv: KVPlan, run: PlannedRun, workload: Workload) -> None:
    """Add the caches that a pass adds its tokens to, and that it reads, with all planned tokens, if
    it is not over a prompt. Pages on nvme have copies in the memory that weights leave."""
    added = workload.batch * workload.sequence * kv.token_nbytes
    used = kv.tokens * kv.token_nbytes if workload.sequence == 1 else 0
    shares = dict(kv.placement.shares)
    on_nvme, away = shares.get(Tier.NVME, 0.0), 1 - shares.get(Tier.DEVICE, 0.0)
    left = run.memory.arena.nbytes - run.memory.account.peak_nbytes
    moved = Bytes(max(0, int(on_nvme * used) - left), int(on_nvme * added))
    if plan.gpu:
        moved.to_device, moved.to_host = int(away * used), int(away * added)
    _spread(moved, Verb.FORWARD, run.experts.model, run.moves)


def _spread(whole: Bytes, verb: Verb, model: ModelShape, moves: Sequence[Move]) -> None:
    """Add `whole` to each pass, in equal parts to the uses of blocks."""
    chosen = [move for move in moves if move.action.verb is verb]
    blocks = {group for unit in model.units if unit.repeated for group in unit.groups}
    inside = [move for move in chosen if move.action.group in blocks] or chosen
    if not inside:
        return
    count = len(inside) // (inside[-1].action.number + 1) or 1
    for index, move in enumerate(inside):
        move.nbytes.add(whole.part(index % count, count))
