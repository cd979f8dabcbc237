"""Whether shards make up the whole, for any number of ranks: nothing left out, nothing twice.

Counted from the layouts that training uses, for every rank. Groups that are laid out alike (a
model's blocks) are gone through once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from offload.tiers.errors import StateError
from offload.zero.layout import SHARD_ALIGN_NUMEL, Layout
from offload.zero.model_shape import ModelShape
from offload.zero.sharding import Part, Sharding


@dataclass(frozen=True)
class Shards:
    """What was found of a model's shards. Elements of one copy of the model."""

    numel: int  # of parameters
    padded_numel: int  # of all groups' buffers
    parts: int  # parts of parameters that were gone through, over all ranks

    @property
    def padding(self) -> float:
        """Of the buffers, the share that is no parameter."""
        return 1 - self.numel / self.padded_numel if self.padded_numel else 0.0


def check_shards(model: ModelShape, sharding: Sharding) -> Shards:
    """Every shard of every group. StateError, naming the group and the rank, where the shards do
    not make up the whole."""
    found: dict[object, int] = {}
    padded = parts = 0
    for group in model.sharded(sharding.ranks, sharding.replicas).groups:
        key = tuple((param.shape, param.trainable) for param in group.params)
        if key not in found:
            found[key] = _check(group.name, group.layout, sharding)
        parts += found[key]
        padded += group.layout.numel
    return Shards(model.numel, padded, parts)


def _check(name: str, layout: Layout, sharding: Sharding) -> int:
    """Parts of parameters in this group, over all ranks."""
    if layout.ranks != sharding.ranks:
        raise StateError(f"{name}: laid out for {layout.ranks} ranks, not {sharding.ranks}")
    trainable, frozen, count = 0, layout.numel_trainable, 0
    covered: dict[int, int] = defaultdict(int)
    for rank in range(sharding.ranks):
        part = Part.of(layout, rank)
        if part.trainable.start != trainable or part.frozen.start != frozen:
            raise StateError(f"{name}: the shard of rank {rank} does not follow the one before it")
        trainable, frozen = part.trainable.stop, part.frozen.stop
        for each in part.trained():
            spec = layout.params[each.index]
            if each.start != covered[each.index] or each.spec.stop > len(part.trainable):
                raise StateError(f"{spec.name}: rank {rank} has another part than is its turn")
            covered[each.index] += each.spec.numel
            count += 1
    if trainable != layout.numel_trainable or frozen != layout.numel:
        raise StateError(f"{name}: the shards of {sharding.ranks} ranks do not end with the buffer")
    for index, spec in enumerate(layout.params):
        if spec.trainable and covered[index] != spec.numel:
            raise StateError(f"{spec.name}: {covered[index]} of {spec.numel} elements are owned")
    if sharding.world_size > 1 and layout.shard_numel % (SHARD_ALIGN_NUMEL * sharding.replicas):
        raise StateError(f"{name}: a shard is not whole pages for each of its replicas")
    return count
