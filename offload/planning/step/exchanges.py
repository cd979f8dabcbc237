"""The collectives of one step, in order, from a model's shape and a rank's sharding.

    stage   forward                      backward
    0                                    every group averaged among the replicas
    1, 2    all-gather of every group    reduce-scatter of every group
    3       all-gather of every group    all-gather and reduce-scatter of every group

Under stages 1 and 2 every group is gathered behind its update, in the reverse of the order in which
gradients are reduced; under stage 3 whenever it is used and is not among the last ones that the
room for whole parameters holds (`zero/ranks/gathered.py`). With room for few groups, 3 x the
parameters travel under stage 3 per pass, and 2 x under the others; 3 x under stage 0 in 16 bits,
where gradients go out as they are and come back as fp32 sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.planning.plan.shared_plan import gather_room, sent_nbytes
from offload.planning.plan.sizes import ITEMSIZE
from offload.planning.step.program import Action, StepProgram, Verb, write_program
from offload.zero.groups.layout import Layout
from offload.zero.groups.model_shape import ModelShape
from offload.zero.ranks.sharding import Sharding

if TYPE_CHECKING:
    from offload.config import OffloadConfig


@dataclass(frozen=True, slots=True)
class Exchange:
    """One call of a process group. `nbytes` is that of the whole buffer, equal on every rank."""

    nbytes: int
    replicas: bool = False  # among the ranks that own the same shard; else among neighbours
    to_each: bool = False  # an all-to-all, of which a reduce-scatter is made; else an all-gather


@dataclass(frozen=True, slots=True)
class Collective:
    """The calls of all ranks for the buffer of one group, requested by `action`."""

    action: Action
    group: int
    exchanges: tuple[Exchange, ...]

    @property
    def nbytes(self) -> int:
        return sum(exchange.nbytes for exchange in self.exchanges)


def step_collectives(
    config: OffloadConfig, model: ModelShape, sharding: Sharding, passes: int
) -> tuple[list[Collective], list[Collective]]:
    """The gathers and the reductions of a rank of `sharding` in one step of `passes` backward
    passes, each of which is reduced (no `no_sync`): two queues, each in one order on all ranks."""
    if sharding.world_size == 1:
        return [], []
    model = model.sharded(sharding.ranks, sharding.replicas)
    program = write_program(config, model, passes)
    itemsize = ITEMSIZE[config.precision]
    own = {i for i, g in enumerate(model.groups) if g.ep_size > 1 or g.layout.is_stored}
    gathered = _of_uses if sharding.parameters else _of_updates
    gathers = [
        Collective(action, group, tuple(exchanges))
        for action, group in (gathered(program, model, itemsize) if sharding.ranks > 1 else ())
        for layout in (model.groups[group].layout,)
        for exchanges in (_gather(layout, itemsize, frozen=sharding.parameters),)
        if group not in own
    ]
    ready = [
        action for action in program.actions
        if action.verb is Verb.GRADIENT and action.group not in own
    ]  # fmt: skip
    ready.sort(key=lambda action: action.number)
    sent = sent_nbytes(config)
    reductions = [
        Collective(action, action.group, tuple(_reduction(layout, sharding, sent)))
        for action in ready
        for layout in (model.groups[action.group].layout,)
    ]
    return gathers, reductions


def _reduction(layout: Layout, sharding: Sharding, itemsize: int) -> Iterator[Exchange]:
    """The calls of `zero.collectives.Collectives.reduce`: 16-bit gradients travel unchanged to the
    owner of their shard, then their fp32 sums among its replicas."""
    if sharding.ranks > 1:
        yield Exchange(layout.numel_trainable * itemsize, to_each=True)
        itemsize = 4
    if sharding.replicas > 1:
        yield Exchange(layout.shard_trainable * itemsize, replicas=True, to_each=True)
        yield Exchange(layout.shard_trainable * 4, replicas=True)


def _gather(layout: Layout, itemsize: int, *, frozen: bool) -> Iterator[Exchange]:
    """The calls that gather a group; trainable and frozen parameters are sharded separately."""
    numels = [layout.numel_trainable, layout.numel - layout.numel_trainable if frozen else 0]
    for numel in filter(None, numels):
        yield Exchange(numel * itemsize)


def _of_updates(
    program: StepProgram, model: ModelShape, itemsize: int
) -> Iterator[tuple[Action, int]]:
    """The gathers of stages 1 and 2: every group once per step, after its update, or after the step
    if updates are made within backward. Frozen groups never change."""
    actions = program.actions
    behind = itertools.takewhile(lambda action: action.verb is not Verb.GRADIENT, actions)
    updates = {action.group: action for action in behind if action.verb is Verb.UPDATE}
    first = next((a for a in actions if a.verb in (Verb.FORWARD, Verb.BACKWARD)), None)
    reduced = [action.group for action in actions if action.verb is Verb.GRADIENT]
    for group in reversed(list(dict.fromkeys(reduced))):
        asks = updates.get(group, first)
        assert asks is not None, "what is reduced is used"
        yield asks, group


def _of_uses(
    program: StepProgram, model: ModelShape, itemsize: int
) -> Iterator[tuple[Action, int]]:
    """The gathers of stage 3: the group that is used and the one behind it, unless they are held;
    those that were used longest ago make room. A pass begins without copies."""
    room = gather_room(model, itemsize)
    sizes = [0 if g.ep_size > 1 else g.layout.numel * itemsize for g in model.groups]
    roots = {group for unit in model.units if not unit.name for group in unit.groups}
    uses = [a for a in program.actions if a.verb in (Verb.FORWARD, Verb.BACKWARD)]
    held: dict[int, None] = {}  # least recently used first
    for action, following in itertools.zip_longest(uses, uses[1:]):
        ends = following is None or following.number != action.number
        kept = {action.group} | (roots if action.verb is Verb.FORWARD else set())
        for group in (action.group,) if ends else (action.group, following.group):
            if group in held:
                continue
            for other in [each for each in held if each not in kept]:
                if sum(sizes[each] for each in held) + sizes[group] <= room:
                    break
                del held[other]
            if group == action.group or sum(sizes[each] for each in held) + sizes[group] <= room:
                held[group] = None
                yield action, group
        held.pop(action.group)
        held[action.group] = None
        if ends:
            held.clear()
