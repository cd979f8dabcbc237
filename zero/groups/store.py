"""A model's weights in tiers: groups, the hooks that gather them, and what fetches them ahead.

    module called ─▶ UnitHooks ─use─▶ WeightStore ─▶ Fetcher ─prefetch─▶ State
                         └──enter──▶ ParamGroup ──tensor─────────────────▶ │

The store has no gradient, optimizer state or update. With values loaded (`load_weights`) and its
hooks in place (`start`) the model computes; `runtime.py` is built on it and trains.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from offload.kernels.bits import FLOAT_OF
from offload.swap.states.fetching import REPEATS, Fetcher
from offload.swap.states.state import State
from offload.swap.threads.shield import check_whole
from offload.tiers.errors import StateError
from offload.zero.experts.packed import ExpertTable, PackedParam
from offload.zero.groups.group import ParamGroup
from offload.zero.groups.layout import Layout, ParamSpec, lay_out
from offload.zero.groups.loading import ValuesOf, load_weights
from offload.zero.groups.model_shape import GroupShape
from offload.zero.groups.parameter_grouping import ParameterGrouping, Unit
from offload.zero.hooks.handles import HandleTable, Keeper, in_backward
from offload.zero.hooks.one_thread import OneThread
from offload.zero.hooks.transforms import refuse_capture
from offload.zero.hooks.unit_hooks import UnitHooks
from offload.zero.ranks.rank_weights import RankWeights
from offload.zero.ranks.sharding import Part, Sharding
from offload.zero.tensors.released import ReleasedParameters, Values

NextUse = Callable[[], float]


class WeightHomes(Protocol):
    """Makes the states of groups' parameters, each at home in the tier of its placement."""

    def parameters(
        self, index: int, name: str, numel: int, next_use: NextUse, trainable: int,
        stride: int | None = None,
    ) -> State:  # fmt: skip
        """Return the state of a group's parameters. Elements from `trainable` on are not updated;
        those before it are parts of `stride` elements, each in pieces of its own (None: one)."""


class WeightStore:
    """Owns the groups of `grouping`. Its methods are for the thread of the model."""

    def __init__(
        self, grouping: ParameterGrouping, homes: WeightHomes, dtype: torch.dtype,
        device: torch.device, *, prefetch: int = 4, ranks: RankWeights | None = None,
        keeper: Keeper | None = None, multiply_quantized: bool = False,
    ) -> None:  # fmt: skip
        """The model computes in `dtype` on `device`; `prefetch` groups are fetched ahead.
        `ranks` are those that share the weights, `keeper` takes saved activations.
        `multiply_quantized`: without gradients few tokens are multiplied with weights as stored."""
        self.dtype = dtype
        self.device = device
        self.own = FLOAT_OF[dtype]
        self._multiply_quantized = multiply_quantized
        self.units = [unit for unit in grouping.units if not unit.is_packed]
        self.packed = grouping.packed
        self.tables: list[ExpertTable] = []
        self._tables: dict[int, ExpertTable] = {}  # by the index of a group
        self.ranks = RankWeights() if ranks is None else ranks
        self.fetcher = Fetcher(prefetch)
        self.trace = self.fetcher.trace
        self.one_thread = OneThread()
        self.unusable: str | None = None  # why nothing may be read or computed (a torn load)
        self.on_close: list[Callable[[], None]] = []
        self.closed = "the tiers of this model are closed"  # the error of a use after `close`
        self.groups: list[ParamGroup] = []
        self._shardings: list[Sharding] = []  # of each group
        self._homes = homes
        self._packed = {id(packed.param): packed for packed in self.packed}
        # from the id of a row to the id of its packed parameter
        self.whole = {id(row): id(each.param) for each in self.packed for row in each.rows}
        self._released = ReleasedParameters(self.group_of, self.packed_of)
        self._where: dict[int, tuple[ParamGroup, int]] = {}
        for shape in grouping.groups:
            self._add_group(shape, grouping.params)
        self._add_tables(grouping)
        self.ranks.watch(self.groups, self.trace)
        self.handles = HandleTable(self.use, keeper)
        self._values: Values | None = None
        self._repeats = 0  # further uses of the group used last
        self._hooks: UnitHooks | None = None  # once started

    # ---------------------------------------------------------------- building
    def _add_group(self, shape: GroupShape, params: Mapping[tuple[str, ...], nn.Parameter]) -> None:
        index, sharding = self.fetcher.next_number, shape.sharding(self.ranks.sharding)
        self._shardings.append(sharding)
        layout = lay_out(shape.params, sharding.ranks, sharding.replicas, matrices=shape.matrices)
        ordered = [params[spec.names] for spec in layout.params]
        state = self._make_state(index, shape, layout)
        group = ParamGroup(
            index, shape.name, layout, ordered, self.dtype, state, self.device,
            self._released.classes_of, shape.ep_size, matrices=shape.matrices,
        )  # fmt: skip
        group.is_lazy = self._multiply_quantized and state.has_quantized
        group.writes.check_assigned = self._released.check_assigned
        self.groups.append(group)
        self.fetcher.add(group, shape.table)
        self._where.update((id(param), (group, number)) for number, param in enumerate(ordered))

    def _add_tables(self, grouping: ParameterGrouping) -> None:
        for packed in self.packed:
            packed.places = [self._where[id(row)] for row in packed.rows]
        tables: dict[str, ExpertTable] = {}
        for unit in grouping.units:
            if unit.table and unit.table not in tables:
                tables[unit.table] = table = ExpertTable(unit.table)
                if unit.is_packed:
                    self.units.append(Unit(unit.table, unit.module))  # a call of it is a session
                    table.module = unit.module
                    own = {id(param): name for name, param in unit.module._parameters.items()}
                    table.packed = {
                        own[key]: packed for key, packed in self._packed.items() if key in own
                    }
        for shape, group in zip(grouping.groups, self.groups, strict=True):
            if shape.table:
                self._tables[group.index] = tables[shape.table]
                tables[shape.table].groups.append(group)
        self.tables = list(tables.values())

    def _make_state(self, index: int, shape: GroupShape, layout: Layout) -> State:
        # homes live as long as files, and keep no model
        this, fetcher = weakref.proxy(self), weakref.proxy(self.fetcher)

        def make(numel: int, trainable: int, stride: int | None) -> State:
            return self._homes.parameters(
                index, shape.name, numel, lambda: fetcher.next_use(index), trainable, stride
            )

        if layout.is_quantized:  # whole on every rank: it has few bytes, which never change
            return make(layout.numel, layout.paged_trainable, None)
        return self.ranks.of(shape.ep_size).parameters(
            make,
            layout,
            lambda: this.groups[index].is_entered,
            lambda: this.groups[index].pending_update.decided(),
        )

    def part_of(self, group: ParamGroup) -> Part:
        """Return this rank's part of a group."""
        sharding = self._shardings[group.index]
        return Part.of(group.layout, sharding.rank, is_shard=sharding.parameters)

    def load(self, group: ParamGroup, values: ValuesOf) -> None:
        """Set a group's weights, of which this rank stores its part; from here on they are
        fetched where they are used."""
        load_weights(group.state, self.part_of(group), self.own, values)
        self.adopt(group)

    def adopt(self, group: ParamGroup) -> None:
        """Adopt a group, whose state has its first values."""
        group.adopt()
        if group.is_gathered:
            self.handles.note(group)  # its module, which would note it, may never be called
        self.ranks.refresh([group])
        table = self.table_of(group)
        if table is not None and group is table.groups[-1]:
            for packed in table.packed.values():
                self.hide(packed)

    def hide(self, packed: PackedParam) -> None:
        """Let a packed parameter be a placeholder: its rows have the values."""
        self._released.hide(packed, self.dtype, self.device)

    def start(
        self, model: nn.Module, values: Values, owner: object,
        begin_forward: Callable[[int], None] | None = None, parts: Sequence[nn.Module] = (),
    ) -> UnitHooks:  # fmt: skip
        """Install the hooks: from here on `model` computes with this store's weights, and keeps
        their `owner`. `begin_forward` is called in place of the store's own. `parts` are models
        that are called one by one in place of `model`, which holds them."""
        self._values = values
        self._hooks = UnitHooks(
            model, self.units, self.groups, self.handles, self.use, values.adopt_written,
            begin_forward or self.begin_forward, owner, self.one_thread, parts,
        )  # fmt: skip
        self._released.connect(self.handles, self._hooks.join_call, values)
        return self._hooks

    @property
    def hooks(self) -> UnitHooks:
        assert self._hooks is not None, "installed by `start`"
        return self._hooks

    # ---------------------------------------------------------------- fetching
    def begin_forward(self, part: int = 0) -> None:
        """Note that the whole model is called, or this part of it."""
        self.check_usable()
        self.adopt_changes()
        self.ranks.begin_pass()
        self.fetcher.begin_forward(part)

    def adopt_changes(self) -> None:
        """Keep what was written to parameters since the last call."""
        assert self._values is not None, "set by `start`"
        self._values.adopt_changes()

    def use(self, group: ParamGroup) -> None:
        """Note that `group` is needed now: start its fetch, gather it if ranks share it, and
        prefetch the groups that come next."""
        backward = in_backward()
        if self._is_repeated(group, backward=backward):
            self.one_thread.check()
            self.one_thread.check_awake()
            return
        with self.one_thread:
            self.check_usable()
            group.pending_update.begin_missed()
            self.fetcher.need(group, backward=backward)
            self.ranks.use(group, backward=backward)
            self.fetcher.fetch_ahead()

    def _is_repeated(self, group: ParamGroup, *, backward: bool) -> bool:
        """Return whether the group was the last one used, so that there is nothing to do: backward
        asks once per saved view. (If the group was evicted, its state fetches it again.) Each
        REPEATS-th use is no repeat, to prefetch what found no room before."""
        if self.unusable is not None or not self.trace.repeats(group.index, backward=backward):
            self._repeats = 0
            return False
        self._repeats += 1
        # several ranks count their uses
        return not self.ranks.has_others and self._repeats % REPEATS != 0

    def announce(self, chosen: Sequence[ParamGroup]) -> None:
        """Start to fetch, in this order, the groups that a module being called will need next (a
        router's chosen experts)."""
        with self.one_thread:
            self.check_usable()
            for group in chosen:
                group.pending_update.begin_missed()
            self.fetcher.announce(chosen)

    def computing(self, unit: Unit) -> AbstractContextManager[None]:
        """Wrap a unit's own forward, for recomputation in a backward pass."""
        return self.hooks.computing(unit)

    def versions(self, unit: Unit) -> tuple[int, ...]:
        """Return numbers that change with every update of a unit's parameters."""
        return tuple(self.groups[index].writes.version for index in unit.groups)

    # ---------------------------------------------------------------- the whole
    def group_of(self, param: torch.Tensor) -> tuple[ParamGroup, int] | None:
        """Return a parameter's group and index; None if it is in none (see `packed_of`)."""
        return self._where.get(id(param))

    def packed_of(self, param: torch.Tensor) -> PackedParam | None:
        """Return a parameter whose rows are in groups of their own; None for any other."""
        return self._packed.get(id(param))

    def rows_of(self, param: nn.Parameter) -> list[nn.Parameter]:
        """Return a packed parameter's rows, in their order; any other is its only one. They can be
        written without having all of it in memory."""
        packed = self.packed_of(param)
        return [param] if packed is None else packed.rows

    def whole_of(self, param: nn.Parameter) -> tuple[ParamSpec, int]:
        """Return the model's parameter that `param` is or is a row of, and the index in it of the
        first element of `param`."""
        group, index = self._where[id(param)]
        packed = self._packed.get(self.whole.get(id(param), 0))
        if packed is None:
            return group.layout.params[index], 0
        return packed.spec, self._tables[group.index].groups.index(group) * param.numel()

    def table_of(self, group: ParamGroup) -> ExpertTable | None:
        """Return the table of experts that `group` belongs to; None if it is no expert."""
        return self._tables.get(group.index)

    def places_of(self, param: torch.Tensor) -> list[tuple[ParamGroup, int]]:
        """Return a parameter's group and its index there; for a packed one, its rows'. Empty if it
        is not managed."""
        packed = self.packed_of(param)
        if packed is not None:
            return packed.places
        place = self.group_of(param)
        return [] if place is None else [place]

    def spec_of(self, param: torch.Tensor) -> ParamSpec | None:
        """Return a parameter's name, shape and whether it is trained; None if it is not managed."""
        packed = self.packed_of(param)
        if packed is not None:
            return packed.spec
        place = self.group_of(param)
        return None if place is None else place[0].layout.params[place[1]]

    def refuse_amid_use(self, doing: str) -> None:
        """Raise StateError while a forward or `gathered` uses a group or a packed parameter."""
        used = [group.name or "the model" for group in self.groups if group.is_entered]
        for name in used + [packed.name for packed in self.packed if packed.is_shown]:
            raise StateError(
                f"{doing} while {name} is gathered: inside `with engine.gathered(...)`, or amid a "
                "forward, what is read there must not change, and what is written there is not in "
                "the tiers yet; leave the block first"
            )

    def check_usable(self) -> None:
        """Raise StateError if the states are a mixture (a load that failed half-way), or another
        process's; UnsupportedError if the device records a graph."""
        self.one_thread.check_process()
        self.one_thread.check_awake()
        refuse_capture(self.device)
        check_whole()
        if self.unusable is not None:
            raise StateError(self.unusable)

    def empty(self) -> None:
        """Let no parameter show memory of the tiers, nor other ranks' parts be held."""
        for group in self.groups:
            if group.is_gathered:
                group.unmap()
        self.handles.forget_addresses()
        self.ranks.empty()

    def wake(self) -> None:
        """Let groups whose home is where it is used be gathered again, after `empty`."""
        for group in self.groups:
            group.adopt()
            if group.is_gathered:
                self.handles.note(group)

    def refuse_use(self) -> None:
        """Refuse every use from here on: the engine is being closed."""
        self.unusable = self.closed

    def close(self, why: str | None = None) -> None:
        """Remove the hooks and release all parameters; the homes free their memory. `why` the model
        has no values then is the error of a use of them; None if its values were given back."""
        self.refuse_use()
        try:
            self.ranks.finish()
        finally:
            self.ranks.close()
        if self._hooks is not None:
            self._hooks.remove()
        if why is not None:
            self._released.closed = why
        for each in self.on_close:
            each()
        for group in self.groups:
            group.unmap()
