"""Sends tokens to the ranks of their experts, and back.

    rank 0   to e0 e1 | e2 e3          rank 0   e0 of 0, e0 of 1, e1 of 0, e1 of 1
    rank 1   to e0 e1 | e2 e3    ─▶    rank 1   e2 of 0, e2 of 1, e3 of 0, e3 of 1

Ranks send as many tokens as there are (counts go ahead), none is padded. All ranks of a group take
part in each exchange, also with nothing to send, in forward and in backward.

`expert_groups` has the ranks that share the experts of a layer, and those with the same experts.

world 4, ep_size 2      rank 0   rank 1   rank 2   rank 3
experts of 8            0 - 3    4 - 7    0 - 3    4 - 7
expert groups           └─ tokens ─┘      └─ tokens ─┘
expert-data groups      0 and 2, 1 and 3: gradients of the same experts
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

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


class Exchange:
    """The exchange of one layer for one forward. `counts` has, for each expert of this rank, the
    rows that come from all ranks. Creating it waits for the other ranks."""

    def __init__(self, counts: Sequence[int], group: dist.ProcessGroup, device: torch.device):
        """`counts` has this rank's tokens for each of all experts."""
        ranks = group.size()
        sent = torch.tensor(counts, device=device).view(ranks, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        self._group = group
        self._sent: list[int] = sent.sum(1).tolist()
        self._pieces: list[list[int]] = received.tolist()  # by source, then by expert
        self._received = [sum(row) for row in self._pieces]
        self.counts: list[int] = received.sum(0).tolist()

    def there(self, x: Tensor) -> Tensor:
        """Turn rows sorted by all experts into rows sorted by the experts of this rank."""
        y = _all_to_all(x, self._sent, self._received, self._group)
        return _transposed(y, self._pieces)

    def back(self, y: Tensor) -> Tensor:
        """Reverse `there`, for the results computed from the rows."""
        by_expert = [list(column) for column in zip(*self._pieces, strict=True)]
        return _all_to_all(_transposed(y, by_expert), self._received, self._sent, self._group)


def _transposed(x: Tensor, pieces: list[list[int]]) -> Tensor:
    """Transpose pieces of rows: x has them row by row of this table of their lengths, the result
    has them column by column."""
    parts = x.split([length for row in pieces for length in row])
    columns = len(pieces[0])
    return torch.cat([part for column in range(columns) for part in parts[column::columns]])


def _all_to_all(
    x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    # A rank whose own part needs no gradient takes part in backward, too: others wait for it.
    anchor = torch.zeros((), device=x.device, requires_grad=torch.is_grad_enabled())
    result: Tensor = _AllToAll.apply(anchor, x, sent, received, group)
    return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, sent: list[int], received: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:  # fmt: skip
        ctx.way_back = received, sent, group
        y = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(y, x.contiguous(), received, sent, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None, None]:
        return None, _all_to_all(grads[0], *ctx.way_back), None, None, None
