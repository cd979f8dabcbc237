"""What a runtime does with other ranks: gather shards, reduce gradients, agree on steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from offload.swap.fences import Fences
from offload.swap.slot_pool import SlotPool
from offload.swap.state import State
from offload.swap.trace import Trace
from offload.swap.transfer import Transfer
from offload.zero.collectives import Wire, Workspace
from offload.zero.gathered import GatheredState, Gatherer, ReplicatedState
from offload.zero.group import ParamGroup, RankCopies
from offload.zero.layout import Layout
from offload.zero.pass_log import PassLog
from offload.zero.ranks import Ranks
from offload.zero.reduction import ReducedGradients, ReductionMemory, Reductions

# Elements of a group that have a home here, and of the parts of it that are pieces of their own.
MakeHome = Callable[[int, int | None], State]


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory where the model computes, for what belongs to several ranks."""

    pool: SlotPool
    gather_nbytes: int  # room for whole parameters
    workspace: Workspace
    fences: Fences


class RankWork:
    """One rank's part in everything that all ranks do together."""

    def __init__(self, ranks: Ranks, memory: SharedMemory, dtype: torch.dtype, wire: Wire) -> None:
        """Every rank has to come here. `dtype` is the parameters'."""
        self.ranks = ranks
        self.sharding = ranks.sharding
        self.collectives = ranks.collectives(wire)
        self._memory = memory
        self._itemsize = dtype.itemsize
        room = ranks.least(memory.gather_nbytes)
        self._gatherer = Gatherer(
            self.collectives, memory.pool, room, ranks.device, memory.fences, dtype,
            memory.workspace.codes,
        )  # fmt: skip
        self._reductions: Reductions | None = None

    # ---------------------------------------------------------------- parameters
    def parameters(
        self, make: MakeHome, layout: Layout, is_held: Callable[[], bool],
        update: Callable[[], Transfer[None] | None],
    ) -> tuple[State, RankCopies]:  # fmt: skip
        """The parameters of a group, as the model sees them, and what they have of other ranks'
        parts. `is_held` and `update` are the group's (see `GatheredState`)."""
        if self.sharding.ranks == 1:
            return make(layout.numel, None), RankCopies()
        shared: GatheredState | ReplicatedState
        if self.sharding.parameters:
            home = make(layout.shard_numel, None)
            shared = GatheredState(home, layout, self._itemsize, self._gatherer, is_held, update)
        else:
            home = make(layout.numel, layout.shard_trainable or None)
            shared = ReplicatedState(
                home, layout, self._itemsize, self._gatherer, self.sharding.rank, update
            )
        return shared, shared

    def refresh(self, groups: Iterable[ParamGroup]) -> None:
        """Bring what other ranks have updated up to date, where it is kept whole."""
        for group in groups:
            group.copies.refresh()

    def use(self, group: ParamGroup, upcoming: Iterator[ParamGroup]) -> None:
        """`group` is needed now: gather it, and what is needed next behind it."""
        if not isinstance(group.state, GatheredState):
            return
        if not group.state.is_gathered:
            self._gatherer.gather(group.state)
        following = next(upcoming, None)
        if following is not None and isinstance(following.state, GatheredState):
            self._gatherer.expect(following.state, group.state)
        self._gatherer.used(group.state)

    def exactly(self) -> AbstractContextManager[None]:
        """Parameters that are gathered inside are exact, also where 8-bit codes travel."""
        return self._gatherer.exactly()

    # ---------------------------------------------------------------- passes
    @property
    def log(self) -> PassLog:
        """What the passes of this rank did that others took part in."""
        return self._gatherer.log

    def begin_pass(self) -> None:
        """The model is called."""
        self._gatherer.begin_pass()

    def finish_pass(self) -> None:
        """The model is called again, or a step is taken: a pass is over, if one was under way."""
        if self._reductions is not None:
            self._reductions.finish()
        self.log.end_pass()

    def idle(self) -> None:
        """Take part in one forward and backward pass of the other ranks without data."""
        assert self._reductions is not None, "made with the groups"
        self.finish_pass()
        self.log.repeat(reduced=self._reductions.synchronising)
        self._reductions.take_nothing()

    # ---------------------------------------------------------------- gradients
    def reduce(
        self,
        groups: list[ReducedGradients],
        dtype: torch.dtype,
        trace: Trace,
        *,
        wait_for_complete_groups: bool,
    ) -> Reductions:
        """From here on gradients of `groups` are reduced (see `Reductions`)."""
        memory = self._memory
        self._reductions = Reductions(
            groups, self.ranks, self.collectives,
            ReductionMemory(memory.pool, memory.workspace, memory.fences),
            self.collectives.wire.reduce_dtype or dtype, self.log, trace,
            wait_for_complete_groups=wait_for_complete_groups,
        )  # fmt: skip
        return self._reductions

    def await_progress(self, *, in_backward: bool) -> bool:
        """For a pool that is out of room; False if there is nothing to wait for."""
        reductions = self._reductions
        return reductions is not None and reductions.await_progress(in_backward=in_backward)

    def moved_nbytes(self) -> dict[str, int]:
        """Bytes of all buffers that were gathered and reduced with other ranks."""
        traffic = self.collectives.traffic
        return {
            "all-gather": traffic.gathered_nbytes,
            "reduce-scatter": traffic.reduced_nbytes,
            "all-reduce": traffic.all_reduced_nbytes,
        }

    def finish(self) -> None:
        """Before everything is closed: what all ranks have asked for, ends on all of them. Another
        rank is in it already, perhaps, and would wait for this one. Not after an error."""
        watch = self.ranks.watch
        if watch.is_leaving:
            return
        if self._reductions is not None:
            self._reductions.drain(watch.timeout_s)
        self._gatherer.order.drain(watch.timeout_s)

    def close(self) -> None:
        if self._reductions is not None:
            self._reductions.close()
        self._gatherer.close()
        self.ranks.watch.close()
