"""The layout of parameters in their group's flat buffer.

    elements  0                          numel_trainable              numel
              ├─ p0 ─┤├─── p1 ───┤├ p2 ┤ │ ├─ frozen q0 ─┤├─ q1 ─┤ │

Trainable parameters come first: gradients and optimizer states cover `[0, numel_trainable)` on the
same grid of elements, so that piece `i` of each class belongs to piece `i` of the others. Frozen
ones that are more than a page begin with a page of their own: they are not written with those.

Several ranks split both regions evenly; each end is padded so that they can. A parameter may lie
in several ranks' shards:

    whole     ├── p0 ──┤├───────── p1 ─────────┤   ┆   ├──── frozen q0 ────┤    ┆
    shards    ├── rank 0 ─────┤├── rank 1 ─────────┤   ├── rank 0 ─┤├── rank 1 ─┤

Matrices that are updated whole (Muon) lie in one rank's shard each, the largest first, each in the
shard that has the fewest elements so far.

At home, parameters that are stored quantized are shorter:

    in a slot   ├─── q_proj ───┤├─ norm ─┤├────── up_proj ──────┤
    stored      ├ int4 ─┤├─ norm ─┤├─── int4 ────┤                  `kernels.weight_formats`, or raw

Parts follow each other in the same order, each on a cache line, so that a part can be dequantized
once the stored bytes up to its end are there. Padding of the slot is not stored; it reads as zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.kernels.weight_formats import LINE_NBYTES, WeightFormat
from offload.tiers.units import round_up

if TYPE_CHECKING:
    import torch

# A parameter starts on a cache line, a full vector in every dtype and a block of 8-bit states.
ALIGN_NUMEL = 256
# Whole pages of 16-bit elements, as a shard is: part of a file can be read and written by itself.
SHARD_ALIGN_NUMEL = 2048


@dataclass(frozen=True, slots=True)
class ParamShape:
    """A parameter without its values: enough to count and to place it."""

    names: tuple[str, ...]  # every qualified name it has in the model (tied weights: several)
    shape: tuple[int, ...]
    trainable: bool = True
    stored: WeightFormat | None = None  # None: as the model computes with it

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec(ParamShape):
    """One parameter in a flat buffer. Offsets and sizes in elements."""

    offset: int = 0

    @property
    def stop(self) -> int:
        return self.offset + self.numel

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.offset : self.stop].view(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The flat buffer of a group: 1D, padded. `ranks` own an equal shard each."""

    params: tuple[ParamSpec, ...]
    numel_trainable: int
    numel: int
    ranks: int = 1

    @property
    def shard_trainable(self) -> int:
        return self.numel_trainable // self.ranks

    @property
    def paged_trainable(self) -> int:
        """Trainable elements if they end with a page, where pieces begin anew; else all."""
        paged = self.numel_trainable % SHARD_ALIGN_NUMEL == 0
        return self.numel_trainable if paged else self.numel

    @property
    def is_quantized(self) -> bool:
        """Whether some parameters are stored quantized; then all are frozen."""
        return any(spec.stored is not None for spec in self.params)

    @property
    def shard_frozen(self) -> int:
        return (self.numel - self.numel_trainable) // self.ranks

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard: trainable ones first, then frozen ones."""
        return self.shard_trainable + self.shard_frozen

    def chunks(self, chunk_numel: int) -> list[range]:
        """Return one rank's trainable elements in pieces of `chunk_numel`, counted from 0."""
        end = self.shard_trainable
        starts = range(0, end, chunk_numel)
        return [range(start, min(start + chunk_numel, end)) for start in starts]


def lay_out(
    params: Sequence[ParamShape], ranks: int = 1, replicas: int = 1, *, matrices: bool = False
) -> Layout:
    """Return the layout of parameters, which may have any order and sizes (also 0), for `ranks`
    shards, each of which can be cut evenly for `replicas`. `matrices`: none is cut."""
    world = ranks * replicas
    if matrices and ranks > 1:
        return _lay_out_whole(params, ranks, replicas)
    frozen = sum(param.numel for param in params if not param.trainable)
    paged = world > 1 or SHARD_ALIGN_NUMEL <= frozen < sum(param.numel for param in params)
    whole = world * SHARD_ALIGN_NUMEL if paged else ALIGN_NUMEL
    specs = []
    offset = 0
    numel_trainable = 0
    for trainable in (True, False):
        for param in params:
            if param.trainable is trainable:
                spec = ParamSpec(param.names, param.shape, trainable, param.stored, offset=offset)
                specs.append(spec)
                # one without elements takes room, too: no state is empty, every update has a chunk
                offset = round_up(offset + max(param.numel, 1), ALIGN_NUMEL)
        offset = numel_trainable + round_up(offset - numel_trainable, whole)
        if trainable:
            numel_trainable = offset
    return Layout(tuple(specs), numel_trainable, offset, ranks)


def _lay_out_whole(params: Sequence[ParamShape], ranks: int, replicas: int) -> Layout:
    """Return the layout of trainable parameters in which each is in one rank's shard."""
    shards: list[list[tuple[ParamShape, int]]] = [[] for _ in range(ranks)]  # and offsets
    ends = [0] * ranks
    for param in sorted(params, key=lambda each: -each.numel):
        rank = ends.index(min(ends))
        shards[rank].append((param, ends[rank]))
        ends[rank] += round_up(max(param.numel, 1), ALIGN_NUMEL)
    shard = round_up(max(ends), replicas * SHARD_ALIGN_NUMEL)
    specs = tuple(
        ParamSpec(param.names, param.shape, offset=rank * shard + offset)
        for rank, its in enumerate(shards) for param, offset in its
    )  # fmt: skip
    return Layout(specs, ranks * shard, ranks * shard, ranks)


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """One parameter. Ranges are bytes of the two buffers."""

    spec: ParamSpec
    values: slice
    stored: slice
    weights: WeightFormat | None  # None: stored as it is


@dataclass(frozen=True, slots=True)
class QuantizedLayout:
    """The stored buffer of a group, 1D."""

    parts: tuple[QuantizedPart, ...]
    nbytes: int  # of the group's buffer in a slot
    stored_nbytes: int


def lay_out_quantized(layout: Layout, itemsize: int) -> QuantizedLayout:
    """Return the stored buffer of one rank's group, whose elements have `itemsize` bytes in a slot.
    Each parameter can be stored as its spec says (see `WeightFormat.refusal`)."""
    parts, end = [], 0
    for spec in layout.params:
        weights, nbytes = spec.stored, spec.numel * itemsize
        stored = nbytes if weights is None else weights.stored_nbytes(spec.numel)
        begin = spec.offset * itemsize
        values, there = slice(begin, begin + nbytes), slice(end, end + stored)
        parts.append(QuantizedPart(spec, values, there, weights))
        end = round_up(there.stop, LINE_NBYTES)
    # no state is empty
    return QuantizedLayout(tuple(parts), layout.numel * itemsize, max(end, LINE_NBYTES))
