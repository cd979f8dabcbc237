"""The collectives of ranks that share a model's weights: gathering shards, agreeing on writes.

`rank_work.py` adds the collectives of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from offload.swap.device.fences import Fences
from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import State
from offload.swap.states.trace import Trace
from offload.swap.threads.lanes import Lane
from offload.swap.threads.ordered import OrderedWork
from offload.swap.threads.transfer import Transfer
from offload.tiers.errors import UnsupportedError
from offload.zero.groups.group import ParamGroup
from offload.zero.groups.layout import Layout
from offload.zero.ranks.collectives import Workspace
from offload.zero.ranks.gathered import GatheredState, Gatherer, ReplicatedState
from offload.zero.ranks.ranks import Ranks
from offload.zero.ranks.sharding import ALONE, Part, Sharding

# Elements of a group that have a home here, and of the parts of it that are pieces of their own.
MakeHome = Callable[[int, int, int | None], State]


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory where the model computes, for what belongs to several ranks: whole parameters, and
    gradients that wait for other ranks'."""

    pool: SlotPool
    gather_nbytes: int  # room for whole parameters
    workspace: Workspace
    fences: Fences


class RankWeights:
    """The ranks that share a model's weights. This base class is a single rank, which exchanges
    nothing, so that callers need not ask whether there are others."""

    sharding: Sharding = ALONE
    rank = 0
    has_others = False

    def of(self, ep_size: int) -> RankWeights:
        """Return the ranks that share a group: of experts that are spread over `ep_size` ranks
        those that have the same ones."""
        return self if ep_size == 1 else RankWeights()

    def parameters(
        self, make: MakeHome, layout: Layout, is_held: Callable[[], bool],
        update: Callable[[], Transfer[None] | None],
    ) -> State:  # fmt: skip
        """Return the parameters of a group, as the model sees them. `is_held` and `update` are the
        group's (see `GatheredState`)."""
        return make(layout.numel, layout.edge, None)

    def watch(self, groups: Sequence[ParamGroup], trace: Trace) -> None:
        """Set all groups, and the order of their uses."""

    def refresh(self, groups: Iterable[ParamGroup]) -> None:
        """Bring what other ranks have updated up to date, where it is kept whole."""

    def use(self, group: ParamGroup, *, backward: bool) -> None:
        """Issue the collectives that all ranks issue for a use of `group`, now."""

    def begin_pass(self) -> None:
        """Note that the model is called."""

    def finish_pass(self) -> None:
        """Note that the model is called again, or a step is taken: a pass in progress is over."""

    def exchange(self, numbers: list[int], what: str) -> np.ndarray:
        """Return every rank's numbers, one row each (see `Ranks.exchange`)."""
        return np.array([numbers])

    def as_on_first(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the first rank's values of each tensor."""
        return tensors

    def combine(self, part: torch.Tensor, name: str) -> torch.Tensor:
        """Return the whole tensor, of which each rank passes its part and zeros for the rest."""
        return part

    def refuse_forward_write(self, names: str) -> None:
        """Raise UnsupportedError if other ranks did not see that a forward wrote to `names`."""

    def moved_nbytes(self) -> dict[str, int]:
        """Return the bytes of all buffers that were gathered and reduced with other ranks."""
        return {}

    def lanes(self) -> list[Lane]:
        """Return the lanes that the model's thread waits for."""
        return []

    def orders(self) -> list[OrderedWork]:
        """Return the threads that issue collectives."""
        return []

    def ending(self) -> Callable[[], None]:
        """Return a function that does what `finish` and `close` do, and keeps no model."""
        return lambda: None

    def finish(self) -> None:
        """Wait, before closing, until collectives that all ranks have issued end. Another rank may
        be in one already and wait for this rank. Not after an error."""

    def close(self) -> None:
        """End the threads. Process groups stay until all of the process ends them."""


class SharedWeights(RankWeights):
    """This rank's side of the collectives over weights that several ranks share."""

    has_others = True

    def __init__(self, ranks: Ranks, memory: SharedMemory, dtype: torch.dtype) -> None:
        """Every rank has to call this. `dtype` is the parameters' format."""
        self.ranks = ranks
        self.rank = ranks.rank
        self.sharding = ranks.sharding
        self.collectives = ranks.collectives()
        self._itemsize = dtype.itemsize
        room = ranks.least(memory.gather_nbytes)
        self._gatherer = Gatherer(self.collectives, memory.pool, room, ranks.device, memory.fences)
        self._groups: Sequence[ParamGroup] = ()
        self._trace: Trace

    def parameters(
        self, make: MakeHome, layout: Layout, is_held: Callable[[], bool],
        update: Callable[[], Transfer[None] | None],
    ) -> State:  # fmt: skip
        rank = self.sharding.rank
        if self.sharding.ranks == 1:
            return make(layout.numel, layout.edge, None)
        shared = Part.of(layout, rank), self._itemsize, self._gatherer, update
        if self.sharding.parameters:
            home = make(layout.shard_numel, layout.shard_trainable, None)
            return GatheredState(home, *shared, is_held)
        home = make(layout.numel, layout.edge, layout.shard_trainable or None)
        return ReplicatedState(home, *shared, rank)

    def watch(self, groups: Sequence[ParamGroup], trace: Trace) -> None:
        self._groups, self._trace = groups, trace

    def refresh(self, groups: Iterable[ParamGroup]) -> None:
        for group in groups:
            group.copies.refresh()

    def use(self, group: ParamGroup, *, backward: bool) -> None:
        upcoming = self._trace.rest() if backward else self._trace.upcoming()
        groups = (self._groups[index] for index in upcoming if index < len(self._groups))
        self._gather(group, groups)

    def _gather(self, group: ParamGroup, upcoming: Iterator[ParamGroup]) -> None:
        """Gather `group`, and after it the groups that are needed next."""
        if not isinstance(group.state, GatheredState):
            return
        if not group.state.is_gathered:
            self._gatherer.gather(group.state)
        following = next(upcoming, None)
        if following is not None and isinstance(following.state, GatheredState):
            self._gatherer.expect(following.state, group.state)
        self._gatherer.used(group.state)

    def begin_pass(self) -> None:
        self.finish_pass()
        self.refresh(self._groups)
        self._gatherer.begin_pass()

    def exchange(self, numbers: list[int], what: str) -> np.ndarray:
        return self.ranks.exchange(numbers, what)

    def as_on_first(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.ranks.as_on_first(tensors)

    def combine(self, part: torch.Tensor, name: str) -> torch.Tensor:
        return self.ranks.combine(part, name)

    def refuse_forward_write(self, names: str) -> None:
        raise UnsupportedError(
            f"a forward wrote to {names} on one of several ranks, each of which has other data "
            "(nn.Embedding(max_norm=...) does that): the ranks would train different models"
        )

    def moved_nbytes(self) -> dict[str, int]:
        traffic = self.collectives.traffic
        return {
            "all-gather": traffic.gathered_nbytes,
            "reduce-scatter": traffic.reduced_nbytes,
            "all-reduce": traffic.all_reduced_nbytes,
        }

    def lanes(self) -> list[Lane]:
        return [*(order.lane for order in self.orders()), self.ranks.watch.lane]

    def orders(self) -> list[OrderedWork]:
        return [self._gatherer.order]

    def ending(self) -> Callable[[], None]:
        orders, ranks = self.orders(), self.ranks

        def end() -> None:
            _drain(orders, ranks)
            _close(orders, ranks)

        return end

    def finish(self) -> None:
        _drain(self.orders(), self.ranks)

    def close(self) -> None:
        _close(self.orders(), self.ranks)


def _drain(orders: Sequence[OrderedWork], ranks: Ranks) -> None:
    if not ranks.watch.is_leaving:
        for order in orders:
            order.drain(ranks.watch.timeout_s)


def _close(orders: Sequence[OrderedWork], ranks: Ranks) -> None:
    for order in orders:
        order.close()
    ranks.watch.close()
