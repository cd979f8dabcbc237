"""Selects few experts that stand for all, since a step treats many experts alike.

A model has thousands of experts, of which a pass touches some. The experts of a table that are at
home in the same tiers are taken together in bundles; one of each, its first, is simulated for all:

    experts of a table   0 1 2 3 | 4 5 6 7 | 8 9 ...
    in the program       0         4         8           each once per pass, as a group is
    in memory            4 copies  4         4           all that may have one, in the long run
    moved                3 times   3         2           those of them that are expected a token

Models of few groups are simulated group by group; but of passes of inference that touch few of a
table's experts the bundles are as many as those, so that a bundle has one of them.

If a router chooses `k` of `E` experts for each of `T` tokens with equal probability, an expert gets
no token with a probability of (1 - k / E)^T, so that E (1 - (1 - k / E)^T) experts are expected to
be touched. Routers that prefer some experts touch fewer (the sum is concave in the experts'
shares). Only touched experts are fetched, get gradients and are updated.

If experts are spread over `ep_size` ranks, a `ModelShape` has those of one rank, to which the
tokens of all of these ranks are sent.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from offload.planning.plan.estimate import Workload
from offload.planning.plan.plan import Plan
from offload.zero.groups.model_shape import ModelShape

MAX_GROUPS = 512  # that a step is simulated with


def touched(experts: int, chosen: int | None, tokens: int) -> float:
    """The expected number of `experts` that `tokens` touch; all of them if the number `chosen` for
    a token is not known."""
    if chosen is None or chosen >= experts:
        return float(experts)
    return experts * -math.expm1(tokens * math.log1p(-chosen / experts))


def _touched_here(here: int, ep_size: int, chosen: int | None, tokens: int) -> int:
    """The touched ones of this rank's experts of a table, rounded up: it has `here` of those that
    are spread over `ep_size` ranks. `tokens`: of all these ranks."""
    return min(here, math.ceil(touched(here * ep_size, chosen, tokens) / ep_size - 1e-9))


@dataclass(frozen=True)
class Representatives:
    """A model whose units use only representatives, and the number of groups that each stands for.
    Groups that are no experts stand for themselves."""

    model: ModelShape
    alike: Mapping[int, int]  # groups by representative
    used: Mapping[int, int]  # of these, in one pass
    updated: Mapping[int, int]  # of these, in one step


def representatives(
    plan: Plan, model: ModelShape, workload: Workload | None, max_groups: int = MAX_GROUPS
) -> Representatives:
    """Select representatives. `workload` is None if every expert is touched."""
    alone = [index for index, group in enumerate(model.groups) if not group.table]
    alike, updated, used = (dict.fromkeys(alone, 1) for _ in range(3))
    chosen, work = model.experts_per_token, workload
    if work is None:
        chosen, work = None, Workload(1, 1)
    step_tokens = work.tokens * plan.sharding.world_size
    is_large = len(model.groups) > max_groups
    for table in model.tables.values():
        here, ep_size = len(table), model.groups[table[0]].ep_size
        few = _touched_here(here, ep_size, chosen, step_tokens)
        bundles = (max_groups - len(alone)) // len(model.tables) if is_large else here
        if few < here and not model.numel_trainable:
            # every pass chooses others: a copy is of use if it is of one of those
            bundles = min(few, bundles)
        together = dict(_bundles(plan, table, max(1, bundles)))
        in_step = _spread(together, few, here)
        alike.update(together)
        updated.update(in_step)
        in_pass = _touched_here(here, ep_size, chosen, work.batch * work.sequence * ep_size)
        used.update(_spread(in_step, in_pass, sum(in_step.values())))
    units = (
        replace(unit, groups=tuple(index for index in unit.groups if updated.get(index)))
        for unit in model.units
    )
    kept = tuple(unit for unit in units if unit.groups or not unit.table)
    return Representatives(replace(model, units=kept), alike, used, updated)


def _bundles(plan: Plan, table: Sequence[int], count: int) -> Iterator[tuple[int, int]]:
    """The first expert and the size of each of about `count` bundles of the same homes."""
    homes: dict[object, list[int]] = defaultdict(list)
    for index in table:
        home = plan.parameters[index], plan.gradients[index], plan.records[index]
        homes[home].append(index)
    length = -(-len(table) // count)
    for same in homes.values():
        for start in range(0, len(same), length):
            yield same[start], min(length, len(same) - start)


def _spread(counts: Mapping[int, int], some: int, whole: int) -> dict[int, int]:
    """Distribute `some` of `whole` things over `counts` as evenly as whole numbers allow."""
    shares, seen = {}, 0
    for index, count in counts.items():
        shares[index] = (seen + count) * some // whole - seen * some // whole
        seen += count
    return shares
