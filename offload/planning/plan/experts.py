"""How many experts a step touches, and what bytes of them move.

A router that chooses `k` of `E` experts for each of `T` tokens, all alike, leaves an expert without
a token with a chance of (1 - k / E)^T. So E (1 - (1 - k / E)^T) of them are expected to be touched;
of routers that prefer some experts to others it is the most (the sum is concave in the experts'
shares). Only what is touched is fetched, gets gradients and is updated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from offload.planning.plan.plan import Plan
from offload.planning.plan.sizes import CLASSES, ExpertClass, GroupBytes
from offload.planning.plan.workload import Workload
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.zero.model_shape import ModelShape

Held = dict[Tier, dict[StateClass, int]]


def touched(experts: int, chosen: int | None, tokens: int) -> float:
    """The expected number of `experts` that `tokens` touch; all where it is not known how many are
    `chosen` for a token."""
    if chosen is None or chosen >= experts:
        return float(experts)
    return experts * -math.expm1(tokens * math.log1p(-chosen / experts))


def touched_whole(experts: int, chosen: int | None, tokens: int) -> int:
    """The same, rounded up."""
    return min(experts, math.ceil(touched(experts, chosen, tokens) - 1e-9))


@dataclass(frozen=True, slots=True)
class ExpertBytes:
    """Bytes of experts that a step moves if no copy of them is kept anywhere."""

    name: str
    touched_nbytes: int  # of the experts that are expected to be touched
    all_nbytes: int  # if all were


@dataclass(frozen=True)
class ExpertEstimate:
    """The experts of a model in one step of one rank."""

    tables: int  # modules of experts
    experts: int  # of all of them
    chosen: int | None  # for a token, of each table; None: not known
    numel: int  # parameters of all experts
    active_numel: int  # parameters of the model that one token is computed with
    tokens: int  # of a pass
    touched_pass: float  # share of the experts that a pass is expected to touch
    touched_step: float  # and all passes of a step
    moved: tuple[ExpertBytes, ...]

    @property
    def touched_nbytes(self) -> int:
        return sum(each.touched_nbytes for each in self.moved)

    @property
    def all_nbytes(self) -> int:
        return sum(each.all_nbytes for each in self.moved)


def estimate_experts(plan: Plan, model: ModelShape, workload: Workload) -> ExpertEstimate | None:
    """None for a model without experts that move one by one."""
    tables = list(model.tables.values())
    if not tables:
        return None
    chosen = model.experts_per_token
    experts = sum(map(len, tables))
    per_pass = workload.batch * workload.sequence
    step_tokens = workload.tokens * plan.sharding.world_size
    numel = sum(model.groups[index].numel for table in tables for index in table)
    return ExpertEstimate(
        tables=len(tables),
        experts=experts,
        chosen=chosen,
        numel=numel,
        active_numel=active_numel(model),
        tokens=per_pass,
        touched_pass=sum(touched(len(t), chosen, per_pass) for t in tables) / experts,
        touched_step=sum(touched(len(t), chosen, step_tokens) for t in tables) / experts,
        moved=tuple(_of_each(plan, tables, chosen, per_pass, step_tokens, workload.passes)),
    )


def idle_nbytes(plan: Plan, model: ModelShape, workload: Workload) -> Held:
    """Of the bytes at home, those of experts that a step is expected not to touch; none where
    experts are as the rest: every tier then has as many of them."""
    idle: Held = {tier: dict.fromkeys(CLASSES, 0) for tier in Tier}
    if ExpertClass.PARAMETERS not in plan.placements:
        return idle
    tokens = workload.tokens * plan.sharding.world_size
    for table in model.tables.values():
        share = 1 - touched(len(table), model.experts_per_token, tokens) / len(table)
        for index in table:
            group, records = plan.groups[index], plan.records[index]
            idle[plan.parameters[index]][StateClass.PARAMETERS] += int(share * group.parameters)
            idle[plan.gradients[index]][StateClass.GRADIENTS] += int(share * group.gradients)
            for tier in records[:1]:  # all of an expert are in the same
                idle[tier][StateClass.OPTIMIZER] += int(share * group.optimizer)
    return idle


def active_numel(model: ModelShape) -> int:
    """Parameters that one token is computed with: without the experts that are not chosen."""
    chosen = model.experts_per_token
    idle = 0
    for table in model.tables.values():
        if chosen is not None and chosen < len(table):
            whole = sum(model.groups[index].numel for index in table)
            idle += whole * (len(table) - chosen) // len(table)
    return model.numel - idle


def _of_each(
    plan: Plan, tables: Sequence[Sequence[int]], chosen: int | None, per_pass: int, per_step: int,
    passes: int,
) -> Iterator[ExpertBytes]:  # fmt: skip
    def moved(
        name: str, times: int, tokens: int, nbytes_of: Callable[[GroupBytes], int]
    ) -> ExpertBytes:
        used = everything = 0
        for table in tables:
            whole = sum(nbytes_of(plan.groups[index]) for index in table)
            everything += times * whole
            used += times * (whole * touched_whole(len(table), chosen, tokens) // len(table))
        return ExpertBytes(name, used, everything)

    yield moved("weights, for forward and backward", 2 * passes, per_pass, lambda g: g.parameters)
    yield moved("gradients", passes, per_pass, lambda g: g.gradients)
    yield moved("optimizer records, read and written", 2, per_step, lambda g: g.optimizer)
    yield moved("updated weights", 1, per_step, lambda g: g.parameters)
