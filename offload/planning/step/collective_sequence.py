"""The collectives of one step, in order, from a model's shape and a rank's sharding.

    stage   forward                      backward
    0                                    every group averaged among the replicas
    1, 2    all-gather of every group    reduce-scatter of every group
    3       all-gather of every group    all-gather and reduce-scatter of every group

Gathering and reducing are two queues, each in an order that all ranks agree on (`zero/gathered`,
`zero/reduction`). Under stages 1 and 2 every group is gathered behind its update, in the reverse of
the order in which gradients are reduced; under stage 3 whenever it is used and is not among the
last ones that the room for whole parameters holds. With room for few groups, 3 x the parameters
travel under stage 3 per pass, and 2 x under the others; 3 x under stage 0 in 16 bits, where
gradients go out as they are and come back as fp32 sums.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.planning.plan.shared_plan import gather_room, sent_nbytes
from offload.planning.plan.sizes import ITEMSIZE, late_groups
from offload.planning.step.program import Action, StepProgram, Verb, write_program
from offload.zero.groups.layout import Layout
from offload.zero.groups.model_shape import ModelShape
from offload.zero.ranks.sharding import Sharding

if TYPE_CHECKING:
    from offload.config import OffloadConfig

_STEPS = 3  # the first one does not know what comes next; the last one counts


class Call(enum.StrEnum):
    """The calls of a process group."""

    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"  # of which a reduce-scatter is made: `zero.collectives`


class Among(enum.StrEnum):
    """The ranks that take part in a call."""

    SHARDS = "shard group"  # neighbouring ranks: one copy of the states
    REPLICAS = "replicas"  # the ranks that own the same shard


@dataclass(frozen=True, slots=True)
class Exchange:
    """One call of a process group. `nbytes` is that of the whole buffer, equal on every rank."""

    call: Call
    among: Among
    nbytes: int


@dataclass(frozen=True, slots=True)
class Collective:
    """The calls of all ranks for the buffer of one group, requested by `action`."""

    action: Action
    group: int
    exchanges: tuple[Exchange, ...]

    @property
    def nbytes(self) -> int:
        return sum(exchange.nbytes for exchange in self.exchanges)


@dataclass(frozen=True)
class CollectiveSequence:
    """The collectives of one step of a long run. The two queues run side by side."""

    program: StepProgram
    gathers: tuple[Collective, ...]
    reductions: tuple[Collective, ...]
    gathered_nbytes: int  # most that whole copies of sharded parameters hold at a time

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        return sum(each.nbytes for each in (*self.gathers, *self.reductions))


def collective_sequence(
    config: OffloadConfig, model: ModelShape, sharding: Sharding, passes: int
) -> CollectiveSequence:
    """The collectives that a rank of `sharding` calls in one step of `passes` backward passes, each
    of which is reduced (no `no_sync`)."""
    model = model.sharded(sharding.ranks, sharding.replicas)
    layouts = [group.layout for group in model.groups]
    itemsize = ITEMSIZE[config.precision]
    program = write_program(config, model, passes)
    gathers: tuple[Collective, ...] = ()
    held = 0
    if sharding.parameters:
        copies = _GatheredGroups(model, layouts, itemsize, gather_room(model, itemsize))
        for _ in range(_STEPS):
            gathers = tuple(copies.step(program))
        held = copies.most_nbytes
    elif sharding.ranks > 1:
        gathers = tuple(_of_updated(program, layouts, itemsize))
    late = late_groups(config, model)
    own = {i for i, g in enumerate(model.groups) if g.ep_size > 1 or g.layout.is_stored}
    ready = [
        action for action in program.actions
        if action.verb is Verb.GRADIENT and action.group not in own
    ]  # fmt: skip
    ready.sort(key=lambda action: (action.number, action.group in late))
    reductions = tuple(
        Collective(action, action.group, tuple(_reduction(layout, sharding, sent)))
        for action in (ready if sharding.world_size > 1 else ())
        for layout in (layouts[action.group],)
        for sent in (sent_nbytes(config, late=action.group in late),)
    )
    gathers = tuple(each for each in gathers if each.group not in own)
    return CollectiveSequence(program, gathers, reductions, held)


def _reduction(layout: Layout, sharding: Sharding, itemsize: int) -> Iterator[Exchange]:
    """The calls of `zero.collectives.Collectives.reduce`: 16-bit gradients travel unchanged to the
    owner of their shard, then their fp32 sums among its replicas."""
    if sharding.ranks > 1:
        yield Exchange(Call.ALL_TO_ALL, Among.SHARDS, layout.numel_trainable * itemsize)
        itemsize = 4
    if sharding.replicas > 1:
        yield Exchange(Call.ALL_TO_ALL, Among.REPLICAS, layout.shard_trainable * itemsize)
        yield Exchange(Call.ALL_GATHER, Among.REPLICAS, layout.shard_trainable * 4)


def _gather(layout: Layout, weight_nbytes: int, *, frozen: bool) -> Iterator[Exchange]:
    """The calls that gather a group; trainable and frozen parameters are sharded separately."""
    numels = [layout.numel_trainable, layout.numel - layout.numel_trainable if frozen else 0]
    for numel in filter(None, numels):
        yield Exchange(Call.ALL_GATHER, Among.SHARDS, numel * weight_nbytes)


def _of_updated(
    program: StepProgram, layouts: Sequence[Layout], weight_nbytes: int
) -> Iterator[Collective]:
    """The gathers of stages 1 and 2: every group once per step, after its update, or after the step
    if updates are made within backward. Frozen groups never change."""
    actions, uses = program.actions, (Verb.FORWARD, Verb.BACKWARD)
    first = next((action for action in actions if action.verb in uses), None)
    behind = itertools.takewhile(lambda action: action.verb is not Verb.GRADIENT, actions)
    updates = {action.group: action for action in behind if action.verb is Verb.UPDATE}
    reduced = [action.group for action in actions if action.verb is Verb.GRADIENT]
    for group in reversed(list(dict.fromkeys(reduced))):
        exchanges = _gather(layouts[group], weight_nbytes, frozen=False)
        asks = updates.get(group, first)
        assert asks is not None, "what is reduced is used"
        yield Collective(asks, group, tuple(exchanges))


def _begins(program: StepProgram) -> dict[int, Action]:
    """The first forward action of every pass."""
    found: dict[int, Action] = {}
    for action in program.actions:
        if action.verb is Verb.FORWARD:
            found.setdefault(action.number, action)
    return found


class _GatheredGroups:
    """The groups that are whole in memory in stage 3, by the rules of `zero.gathered.Gatherer`."""

    def __init__(
        self, model: ModelShape, layouts: Sequence[Layout], weight_nbytes: int, room_nbytes: int
    ) -> None:
        self._layouts = layouts
        self._whole = {index for index, group in enumerate(model.groups) if group.ep_size > 1}
        self._weight_nbytes = weight_nbytes
        self._room = room_nbytes
        roots = [unit.groups for unit in model.units if not unit.name]
        self._kept = frozenset(group for groups in roots for group in groups)  # all of a forward
        self._held: dict[int, None] = {}  # the least recently used first
        self._nbytes = 0
        self.most_nbytes = 0
        self._learnt = False

    def step(self, program: StepProgram) -> list[Collective]:
        found: list[Collective] = []
        reduced: set[int] = set()
        begins = _begins(program)
        for action in program.actions:
            if action is begins[action.number]:  # a pass begins without copies
                self._forget(list(self._held))
            if action.verb is Verb.GRADIENT:
                reduced.add(action.group)
            elif action.verb is not Verb.UPDATE:
                later = begins.get(action.number + 1)
                end = len(program.uses) if later is None else later.position
                found += self._use(action, program.uses, end)
            elif action.group in reduced:  # within backward
                self._forget([action.group])
        self._learnt = True
        trained = {group for group, layout in enumerate(self._layouts) if layout.numel_trainable}
        self._forget(trained)  # their updates are pending
        return found

    def _use(self, action: Action, uses: Sequence[int], end: int) -> Iterator[Collective]:
        """Gather the used group and the next one, if they are not held. `end`: of this pass's
        uses."""
        group = action.group
        kept = self._kept if action.verb is Verb.FORWARD else frozenset[int]()
        if group not in self._held:
            self._make_room(self._nbytes_of(group), kept)
            yield self._gather(action, group)
        if self._learnt:
            # a repeat in a row is at the place of the use before it
            repeated = action.position > 0 and uses[action.position - 1] == group
            place = action.position + (not repeated)
            last = place >= end and action.verb is not Verb.FORWARD  # of this pass
            following = uses[place % len(uses)]
            if following not in self._held and not last:
                self._make_room(self._nbytes_of(following), {*kept, group})
                if self._nbytes + self._nbytes_of(following) <= self._room:
                    yield self._gather(action, following)
        self._held[group] = self._held.pop(group)

    def _gather(self, action: Action, group: int) -> Collective:
        self._held[group] = None
        self._nbytes += self._nbytes_of(group)
        self.most_nbytes = max(self.most_nbytes, self._nbytes)
        exchanges = _gather(self._layouts[group], self._weight_nbytes, frozen=True)
        return Collective(action, group, tuple(exchanges))

    def _nbytes_of(self, group: int) -> int:
        whole = group in self._whole  # without a gather
        return 0 if whole else self._layouts[group].numel * self._weight_nbytes

    def _make_room(self, nbytes: int, kept: Collection[int]) -> None:
        for other in list(self._held):
            if self._nbytes + nbytes <= self._room:
                return
            if other not in kept:
                self._forget([other])

    def _forget(self, groups: Collection[int]) -> None:
        for group in groups:
            if group in self._held:
                del self._held[group]
                self._nbytes -= self._nbytes_of(group)
