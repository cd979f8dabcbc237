"""The bytes of a model's states, computed from its groups without allocating."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from offload.kernels.rules import StateFormat
from offload.kernels.variants import Master
from offload.planning.plan.chunk_and_prefetch import USUAL_PREFETCH
from offload.tiers.ledger import StateClass
from offload.tiers.placement import Placement
from offload.tiers.tier import PAGE_NBYTES, TIERS, Tier
from offload.tiers.units import round_up
from offload.zero.groups.layout import Layout, lay_out_quantized
from offload.zero.groups.model_shape import GroupShape, ModelShape
from offload.zero.ranks.sharding import ALONE, Sharding
from offload.zero.step.records import RecordFormat

if TYPE_CHECKING:
    from offload.config import OffloadConfig

STAGING_BUFFERS = 4  # read | compute | write, and one to spare
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
CLASSES = (StateClass.PARAMETERS, StateClass.GRADIENTS, StateClass.OPTIMIZER)
Placements = Mapping[StateClass, Placement]


def tiers_of(placements: Placements, state_class: StateClass) -> set[Tier]:
    """The tiers of a class of states; empty if it has no home."""
    home = placements.get(state_class)
    return set() if home is None else set(home.tiers)


@dataclass(frozen=True)
class GroupBytes:
    """The bytes of one group's states in whole pages, as the tiers account for them."""

    name: str
    layout: Layout
    parameters: int  # at home; quantized if they are stored so
    gradients: int
    records: tuple[int, ...]
    summed: bool = False  # gradients are fp32 sums of 16-bit ones: never on nvme
    home_numel: int = 0  # elements of the parameters that are at home on this rank
    table: str = ""  # the module of experts that it is one of
    dequantized: int = 0  # what is computed with, if the home is quantized
    matrices: bool = False  # that Muon trains

    @property
    def updated_numel(self) -> int:
        """The elements of `home_numel` that an update writes home."""
        whole = self.home_numel == self.layout.numel
        return self.layout.paged_trainable if whole else self.layout.shard_trainable

    @cached_property
    def optimizer(self) -> int:
        return sum(self.records)

    def pieces(self, state_class: StateClass) -> tuple[int, ...]:
        """The bytes that are placed one by one: records of chunks, or all of another class."""
        whole = self.gradients if state_class is StateClass.GRADIENTS else self.parameters
        return self.records if state_class is StateClass.OPTIMIZER else (whole,)

    @cached_property
    def trained_numels(self) -> tuple[int, ...]:
        """The elements of each trainable parameter."""
        return tuple(spec.numel for spec in self.layout.params if spec.trainable)


@dataclass(frozen=True)
class Sizes:
    """The numbers of the configuration that bytes depend on."""

    itemsize: int
    gradient_itemsize: int
    record_format: RecordFormat
    chunk_numel: int
    prefetch: int

    def record_nbytes(self, numel: int, *, matrices: bool = False) -> int:
        """The bytes of a record of `numel` elements; of `matrices` that Muon trains."""
        return pages(self.record_format.of(matrices=matrices).nbytes(numel))


def measure(
    config: OffloadConfig, model: ModelShape, sharding: Sharding = ALONE
) -> tuple[GroupBytes, ...]:
    """Compute the bytes of every group's states on one rank. `model` is cut into its shards."""
    sizes = sizes_of(config)
    return tuple(_group_bytes(group, sizes, group.sharding(sharding)) for group in model.groups)


def record_format(config: OffloadConfig) -> RecordFormat:
    """The format of optimizer records."""
    optimizer = config.optimizer
    return RecordFormat(
        Master[config.master.upper()], optimizer.state_names, StateFormat[optimizer.states.upper()]
    )


def planned_shape(config: OffloadConfig, model: ModelShape) -> ModelShape:
    """Return a model as it is planned before there is an engine: Muon's usual matrices in groups of
    their own, and frozen weights as they are stored."""
    names = model.matrices if config.optimizer.type == "muon" else ()
    return model.with_matrices(names).stored(config.stored)


def sizes_of(config: OffloadConfig) -> Sizes:
    itemsize = ITEMSIZE[config.precision]
    several = config.gradient_accumulation_steps > 1
    prefetch = USUAL_PREFETCH if config.prefetch == "auto" else config.prefetch
    return Sizes(
        itemsize, 4 if several else itemsize, record_format(config), config.chunk_numel, prefetch
    )


def _group_bytes(group: GroupShape, sizes: Sizes, sharding: Sharding) -> GroupBytes:
    """The bytes of a group. Gradients of experts that are spread over ranks are kept until the
    step, which reduces them."""
    layout, itemsize = group.layout, sizes.gradient_itemsize
    is_kept = group.ep_size > 1 and sharding.world_size > 1
    before = pages_or_none(layout.numel_trainable * itemsize) if is_kept else 0
    here = layout.shard_numel if sharding.parameters else layout.numel
    values = pages(here * sizes.itemsize)
    record_nbytes = partial(sizes.record_nbytes, matrices=group.matrices)
    return GroupBytes(
        name=group.name or "(root)",
        layout=layout,
        parameters=pages(stored_nbytes(group, sizes.itemsize)) if layout.is_quantized else values,
        gradients=pages_or_none(layout.shard_trainable * itemsize) + before,
        records=_by_chunk(layout.shard_trainable, sizes.chunk_numel, record_nbytes),
        summed=itemsize > sizes.itemsize,
        home_numel=here,
        table=group.table,
        dequantized=values if layout.is_quantized else 0,
        matrices=group.matrices,
    )


def stored_nbytes(group: GroupShape, itemsize: int) -> int:
    """The bytes of a group's parameters at home as stored: quantized, or values without padding."""
    layout = group.layout
    if layout.is_quantized:
        return lay_out_quantized(layout, itemsize).stored_nbytes
    return group.numel * itemsize


def _by_chunk(numel: int, chunk_numel: int, nbytes_of: Callable[[int], int]) -> tuple[int, ...]:
    """The bytes of every chunk; all but the last have the same length."""
    full, rest = divmod(numel, chunk_numel)
    last = (nbytes_of(rest),) if rest else ()
    return (nbytes_of(chunk_numel),) * full + last if full else last


@dataclass(frozen=True)
class RecordKind:
    """Equal records of one group."""

    tier: Tier
    numel: int
    count: int


def record_kinds(
    group: GroupBytes, tiers: Sequence[Tier], chunk_numel: int
) -> Iterator[RecordKind]:
    """Group the records by tier, the last, possibly shorter one apart; `tiers` has one each."""
    if not tiers:
        return
    last = group.layout.shard_trainable - (len(tiers) - 1) * chunk_numel
    for tier in TIERS:
        count = tiers.count(tier) - (tiers[-1] is tier)
        if count:
            yield RecordKind(tier, chunk_numel, count)
    yield RecordKind(tiers[-1], last, 1)


def gathered_unit(model: ModelShape, groups: Sequence[GroupBytes], other_nbytes: int = 0) -> int:
    """The memory for the largest unit's parameters, none of which have their home there."""
    values = [group.dequantized or group.parameters for group in groups]
    quantized = [group.parameters if group.dequantized else 0 for group in groups]
    return largest_unit(model, values, other_nbytes, quantized)


def largest_unit(
    model: ModelShape, parameters: Sequence[int], other_nbytes: int = 0,
    quantized: Sequence[int] = (),
) -> int:  # fmt: skip
    """The memory for parameters that are gathered at the same time, a unit's and an enclosing
    root's (an expert's and its block's), beside one other copy. `parameters` are bytes by group;
    `quantized` are those that some are dequantized from, one at a time, when the place for the
    values is taken.

    They lie where earlier copies left room: with `n` copies in use, the space between them may be
    in `n + 1` pieces, each just too small for the next copy. That much more is always enough.
    """
    root = [index for u in model.units if not u.name for index in u.groups]
    largest = 0
    around: list[int] = []  # the groups of the unit that an expert's is in
    within = ""
    for unit in model.units:
        used = list(unit.groups)
        if unit.table:
            used += around if unit.table.startswith(within) else ()
        else:
            around, within = list(unit.groups), f"{unit.name}."
        used += root if unit.name else ()
        copies = [parameters[index] for index in used if parameters[index]]
        copies += [other_nbytes] if other_nbytes else []
        stored = max((quantized[index] for index in used), default=0) if quantized else 0
        holes = max(max(0, len(copies) - 1) * max(copies, default=0), (len(copies) + 1) * stored)
        largest = max(largest, sum(copies) + holes)
    return largest


def pages_or_none(nbytes: int) -> int:
    """Like `pages`, but 0 for 0 bytes."""
    return pages(nbytes) if nbytes else 0


def pages(nbytes: int) -> int:
    """Round up to whole pages, at least one."""
    return round_up(max(nbytes, 1), PAGE_NBYTES)
