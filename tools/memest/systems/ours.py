"""The memory of offload's runtime, by the planner that trains, for comparison with other systems.

One rank is planned, on its share of the node, with the shards that it would own; what it needs for
working with the others is in its plan.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offload.kernels.variants import Master
from offload.planning.choice.solver import solve
from offload.planning.plan.estimate import MemoryClass as M
from offload.planning.plan.estimate import Shortfall
from offload.planning.plan.plan import Hardware, Plan, needed_nbytes
from offload.planning.plan.shortfalls import shortfalls
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.tools.memest.systems.memory import (
    FRAGMENTATION,
    FRAMEWORK,
    Bytes,
    Framework,
    Held,
    with_libraries,
)
from offload.tools.memest.systems.subject import Ranks, Room, Subject
from offload.zero.groups.model_shape import ModelShape
from offload.zero.ranks.sharding import Sharding

if TYPE_CHECKING:
    from offload.config import OffloadConfig

_CLASS = {
    StateClass.PARAMETERS: M.PARAMETERS,
    StateClass.GRADIENTS: M.GRADIENTS,
    StateClass.ACTIVATIONS: M.ACTIVATIONS,
    StateClass.STAGING: M.STAGING,
}


@dataclass(frozen=True)
class OurPlan:
    """A plan of one rank, the bytes of GPU, node and disks, and reasons why it cannot work."""

    config: OffloadConfig  # settled
    plan: Plan
    held: Bytes
    short: tuple[Shortfall, ...]

    @property
    def short_tiers(self) -> tuple[Tier, ...]:
        return tuple(dict.fromkeys(each.tier for each in self.short))


def plan_ours(
    config: OffloadConfig, model: ModelShape, subject: Subject, ranks: Ranks, room: Room,
    framework: Framework = FRAMEWORK,
) -> OurPlan:  # fmt: skip
    """Plan offload on one rank's share of `room`, with the budgets that activations and libraries
    leave.

    Budgets that the configuration names are kept. Raise ConfigError if shard groups do not divide
    the ranks.
    """
    hardware = _hardware(config, room, ranks)
    config = _with_budgets(config, hardware, subject.activation_nbytes, framework)
    best = solve(config, model, hardware).best
    held = _held(best.plan, subject, ranks, framework)
    return OurPlan(best.config, best.plan, held, shortfalls(best.plan, hardware))


def _hardware(config: OffloadConfig, room: Room, ranks: Ranks) -> Hardware:
    host = room.host_nbytes // ranks.per_node
    return Hardware(
        room.device_nbytes, host, host, room.nvme_nbytes // ranks.per_node,
        kernels_missing=None if room.device_nbytes else "the model computes on the CPU",
        sharding=Sharding.of(config.zero.stage, config.zero.shard_group, ranks.count, 0),
    )  # fmt: skip


def _with_budgets(
    config: OffloadConfig, hardware: Hardware, aside_nbytes: int, framework: Framework
) -> OffloadConfig:
    """Return the configuration with a budget for each tier without one: all that libraries and
    activations leave."""

    def left(nbytes: int, libraries: int, aside: int) -> int:
        return max(0, int((nbytes - libraries) / (1 + FRAGMENTATION)) - aside)

    gpu = hardware.device_nbytes > 0
    in_ram = 0 if gpu else aside_nbytes
    chosen = {
        "host": left(hardware.host_nbytes, framework.host_nbytes, in_ram),
        "nvme": hardware.nvme_free_nbytes,
    }
    if gpu:
        chosen["device"] = left(hardware.device_nbytes, framework.gpu_nbytes, aside_nbytes)
    given = config.budget
    update = {name: n for name, n in chosen.items() if getattr(given, name) is None}
    return config.model_copy(update={"budget": given.model_copy(update=update)})


def _held(plan: Plan, subject: Subject, ranks: Ranks, framework: Framework) -> Bytes:
    """Return the bytes of the plan's tiers by class, of a GPU and of a whole node."""
    held: Held = {tier: defaultdict(int) for tier in Tier}
    for tier, by_class in plan.expected.items():
        place = held[tier]
        for state_class, nbytes in by_class.items():
            if state_class is StateClass.OPTIMIZER:
                master = int(nbytes * _master_share(plan, tier))
                place[M.MASTER] += master
                place[M.OPTIMIZER] += nbytes - master
            else:
                place[_CLASS.get(state_class, M.STAGING)] += nbytes
        place[M.STAGING] += max(0, needed_nbytes(plan, tier) - plan.total(tier))
    held[Tier.DEVICE][M.ACTIVATIONS] += subject.activation_nbytes
    return with_libraries(held, ranks, framework)


def _master_share(plan: Plan, tier: Tier) -> float:
    """Return the part of a record that is the master, not a state of the optimizer."""
    kept = plan.record_formats[tier]
    numel = 1 << 20
    whole = kept.nbytes(numel)
    without = replace(kept, master=Master.NONE).nbytes(numel)
    return (whole - without) / whole if whole else 0.0
