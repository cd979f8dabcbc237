"""Selects few experts that stand for all, since a step treats many experts alike.

A model has thousands of experts, of which a pass touches some. The experts of a table that are at
home in the same tiers are taken together in bundles; one of each, its first, is simulated for all:

    experts of a table   0 1 2 3 | 4 5 6 7 | 8 9 ...
    in the program       0         4         8           each once per pass, as a group is
    in memory            4 copies  4         4           all that may have one, in the long run
    moved                3 times   3         2           those of them that are expected a token

Models of few groups are simulated group by group; but of passes of inference that touch few of a
table's experts the bundles are as many as those, so that a bundle has one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from offload.planning.plan.experts import tables_of
from offload.planning.plan.plan import Plan
from offload.planning.plan.workload import Workload
from offload.zero.groups.model_shape import ModelShape

MOST_GROUPS = 512  # that a step is simulated with


@dataclass(frozen=True)
class Representatives:
    """A model whose units use only representatives, and the number of groups that each stands for.
    Groups that are no experts stand for themselves."""

    model: ModelShape
    alike: Mapping[int, int]  # groups by representative
    used: Mapping[int, int]  # of these, in one pass
    updated: Mapping[int, int]  # of these, in one step


def representatives(
    plan: Plan, model: ModelShape, workload: Workload | None, most_groups: int = MOST_GROUPS
) -> Representatives:
    """Select representatives. `workload` is None if every expert is touched."""
    alone = [index for index, group in enumerate(model.groups) if not group.table]
    alike, updated, used = (dict.fromkeys(alone, 1) for _ in range(3))
    chosen, work = model.experts_per_token, workload
    if work is None:
        chosen, work = None, Workload(1, 1)
    step_tokens = work.tokens * plan.sharding.world_size
    is_large = len(model.groups) > most_groups
    for table in tables_of(model):
        here, few = len(table.indices), table.touched(chosen, step_tokens)
        bundles = (most_groups - len(alone)) // len(model.tables) if is_large else here
        if few < here and not model.numel_trainable:
            # every pass chooses others: a copy is of use if it is of one of those
            bundles = min(few, bundles)
        together = dict(_bundles(plan, table.indices, max(1, bundles)))
        in_step = _spread(together, few, here)
        touched = sum(in_step.values())
        alike.update(together)
        updated.update(in_step)
        sent_here = work.batch * work.sequence * table.ep_size
        used.update(_spread(in_step, table.touched(chosen, sent_here), touched))
    units = (
        replace(unit, groups=tuple(index for index in unit.groups if updated.get(index)))
        for unit in model.units
    )
    kept = tuple(unit for unit in units if unit.groups or not unit.table)
    return Representatives(replace(model, units=kept), alike, used, updated)


def _bundles(plan: Plan, table: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """The first expert and the size of each of about `most` bundles of the same homes."""
    homes: dict[object, list[int]] = defaultdict(list)
    for index in table:
        home = plan.parameters[index], plan.gradients[index], plan.records[index]
        homes[home].append(index)
    length = -(-len(table) // most)
    for same in homes.values():
        for start in range(0, len(same), length):
            yield same[start], min(length, len(same) - start)


def _spread(counts: Mapping[int, int], some: int, whole: int) -> dict[int, int]:
    """Distribute `some` of `whole` things over `counts` as evenly as whole numbers allow."""
    found, seen = {}, 0
    for index, count in counts.items():
        found[index] = (seen + count) * some // whole - seen * some // whole
        seen += count
    return found
