"""The collectives of one step, from a model's shape and a rank's sharding.

    stage   forward                      backward
    0                                    every group averaged among the replicas
    1, 2    all-gather of every group    reduce-scatter of every group
    3       all-gather of every group    all-gather and reduce-scatter of every group

Under stages 1 and 2 every group is gathered behind its update, under stage 3 whenever it is used
(`zero/ranks/gathered.py` keeps the last ones, which saves the gather of the last use of forward in
backward). So 3 x the parameters travel under stage 3 per pass, and 2 x under the others; 3 x under
stage 0 in 16 bits, where gradients go out as they are and come back as fp32 sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.planning.plan.buffers import sent_nbytes
from offload.planning.plan.sizes import ITEMSIZE
from offload.planning.step.program import Action, Verb
from offload.zero.groups.model_shape import GroupShape
from offload.zero.ranks.sharding import Sharding

if TYPE_CHECKING:
    from offload.config import OffloadConfig


@dataclass(frozen=True, slots=True)
class Exchange:
    """One call of a process group. `nbytes` is that of the whole buffer, equal on every rank."""

    nbytes: int
    replicas: bool = False  # among the ranks that own the same shard; else among neighbours
    to_each: bool = False  # an all-to-all, of which a reduce-scatter is made; else an all-gather


def exchanges_of(
    action: Action, before: Action | None, group: GroupShape, sharding: Sharding,
    config: OffloadConfig,
) -> Iterator[Exchange]:  # fmt: skip
    """The calls of all ranks for the buffer of the action's group, which is cut into shards.
    `before` is the use before it. Experts on ranks of their own and weights in codes are whole."""
    if sharding.world_size == 1 or group.ep_size > 1 or group.layout.is_stored:
        return
    layout, itemsize = group.layout, ITEMSIZE[config.precision]
    if action.verb is Verb.GRADIENT:
        sent = sent_nbytes(config)
        if sharding.ranks > 1:  # 16-bit gradients to the owner of their shard ...
            yield Exchange(layout.numel_trainable * sent, to_each=True)
            sent = 4
        if sharding.replicas > 1:  # ... and their fp32 sums among its replicas
            yield Exchange(layout.shard_trainable * sent, replicas=True, to_each=True)
            yield Exchange(layout.shard_trainable * 4, replicas=True)
        return
    gathers = action.verb is not Verb.UPDATE if sharding.parameters else action.verb is Verb.UPDATE
    same = before is not None and (before.group, before.number) == (action.group, action.number)
    if sharding.ranks == 1 or not gathers or (sharding.parameters and same):
        return
    frozen = layout.numel - layout.numel_trainable if sharding.parameters else 0
    for numel in (layout.numel_trainable, frozen):  # which are cut into shards separately
        if numel:
            yield Exchange(numel * itemsize)
