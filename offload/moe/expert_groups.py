"""The ranks that share the experts of a layer, and the ranks that have the same experts.

world 4, ep_size 2      rank 0   rank 1   rank 2   rank 3
experts of 8            0 - 3    4 - 7    0 - 3    4 - 7
expert groups           └─ tokens ─┘      └─ tokens ─┘
expert-data groups      0 and 2, 1 and 3: gradients of the same experts
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist

from offload.tiers.errors import ConfigError

Group = dist.ProcessGroup


@dataclass(frozen=True)
class ExpertGroups:
    """This rank's groups for one `ep_size`."""

    expert: Group  # ranks that have all experts together
    data: Group  # ranks that have this one's experts


# Making a group is a collective, and every layer of a model has the same ones.
_MADE: WeakKeyDictionary[Group, dict[int, ExpertGroups]] = WeakKeyDictionary()


def expert_groups(ep_size: int) -> ExpertGroups:
    """Return the groups of the current process group; the first call for an `ep_size` creates them,
    and every rank has to call it. Raise ConfigError if the ranks cannot be divided so."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None:
        raise ConfigError(
            f"MoE: ep_size is {ep_size}, and there is no process group; call "
            "torch.distributed.init_process_group before the layer is built, or set ep_size=1"
        )
    size = world.size()
    if size % ep_size:
        raise ConfigError(
            f"MoE: ep_size is {ep_size}, and {size} ranks do not divide into groups of {ep_size}"
        )
    made = _MADE.setdefault(world, {})
    if ep_size not in made:
        experts = [[*range(first, first + ep_size)] for first in range(0, size, ep_size)]
        data = [list(ranks) for ranks in zip(*experts, strict=True)]
        made[ep_size] = ExpertGroups(
            dist.new_subgroups_by_enumeration(experts)[0],
            dist.new_subgroups_by_enumeration(data)[0],
        )
    return made[ep_size]
