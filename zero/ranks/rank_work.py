"""The ranks that train together: their collectives over weights and gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from offload.swap.states.state import State
from offload.swap.states.trace import Trace
from offload.swap.threads.lanes import Lane
from offload.swap.threads.ordered import OrderedWork
from offload.swap.threads.transfer import Transfer
from offload.tiers import accelerator
from offload.tiers.errors import UnsupportedError
from offload.zero.groups.group import ParamGroup
from offload.zero.groups.layout import Layout
from offload.zero.ranks.collectives import SharedMemory
from offload.zero.ranks.gathered import GatheredState, Gatherer, ReplicatedState
from offload.zero.ranks.rank_weights import MakeHome, RankWeights
from offload.zero.ranks.ranks import Ranks
from offload.zero.ranks.reduction import Reductions, SharedReductions
from offload.zero.ranks.shard_service import ShardService
from offload.zero.ranks.sharding import Part


class RankWork(RankWeights):
    """The ranks that train a model together; this base class is a single rank."""

    def __init__(self) -> None:
        self.reductions = Reductions()

    def of(self, ep_size: int) -> RankWork:
        return self

    def refresh_updated(self) -> None:
        """Note that a step's updates are submitted: call `refresh` for groups that it updates, in
        the order of use."""

    def note(self, what: str) -> None:
        """Note that all ranks should do this now (see `Ranks.notes`)."""


class SharedWork(RankWork):
    """This rank's side of all collectives.

    Those of experts that are spread over ranks, where some ranks have the same ones, have process
    groups and threads of their own. Their gradients are summed here and reduced in the step, since
    which of them come in backward, and when, depends on tokens.
    """

    has_others = True
    reductions: SharedReductions

    def __init__(
        self, ranks: Ranks, memory: SharedMemory, dtype: torch.dtype,
        reduce_dtype: torch.dtype | None = None, ep_size: int = 1, *,
        wait_for_complete_groups: bool,
    ) -> None:  # fmt: skip
        """Every rank has to call this. `dtype` is the parameters' format, `reduce_dtype` the one
        that gradients are rounded to before they travel, if any; `ep_size` is the number of ranks
        over which experts are spread. `wait_for_complete_groups`: see `SharedReductions`."""
        self.ranks = ranks
        self.rank = ranks.rank
        self.sharding = ranks.sharding
        self.collectives = ranks.collectives()
        self._itemsize = dtype.itemsize
        room = int(ranks.exchange([memory.gather_nbytes], "the room to gather in").min())
        self._gatherer = Gatherer(
            self.collectives, memory.pool, room, ranks.device, memory.fences, self._service()
        )
        together = self.sharding.parameters and self._gatherer.service is None
        ranks.watch.follows |= together and self.sharding.replicas == 1
        same = ranks.same_experts(ep_size) if ep_size > 1 else None
        self._experts = RankWork()
        if same is not None:
            self._experts = SharedWork(
                same, memory, dtype, reduce_dtype,
                wait_for_complete_groups=wait_for_complete_groups,
            )  # fmt: skip
        self._experts.reductions.synchronising = False
        self.reductions = SharedReductions(
            ranks, self.collectives, memory, reduce_dtype or dtype, reduce_dtype or torch.float32,
            self._experts.reductions, wait_for_complete_groups=wait_for_complete_groups,
            exchanges_tokens=ep_size > 1,
        )  # fmt: skip
        self._groups: Sequence[ParamGroup] = ()
        self._trace: Trace

    def of(self, ep_size: int) -> RankWork:
        return self if ep_size == 1 else self._experts

    def _service(self) -> ShardService | None:
        """Return what lets each rank gather by itself; None where all gather together."""
        device, group = self.ranks.device, self.collectives.gather_group
        apart = not accelerator.is_accelerator(device) and dist.get_backend(group) == "gloo"
        if not (apart and self.sharding.parameters):
            return None
        return ShardService(group, device, self.ranks.watch.timeout_s)

    def parameters(
        self, make: MakeHome, layout: Layout, is_held: Callable[[], bool],
        update: Callable[[], Transfer[None] | None],
    ) -> State:  # fmt: skip
        rank = self.sharding.rank
        if self.sharding.ranks == 1:
            return make(layout.numel, layout.paged_trainable, None)
        shared = Part.of(layout, rank), self._itemsize, self._gatherer, update
        if self.sharding.parameters:
            home = make(layout.shard_numel, layout.shard_trainable, None)
            return GatheredState(home, *shared, is_held)
        home = make(layout.numel, layout.paged_trainable, layout.shard_trainable or None)
        return ReplicatedState(home, *shared, rank)

    def watch(self, groups: Sequence[ParamGroup], trace: Trace) -> None:
        self._groups = groups
        self._trace = self.reductions.trace = trace
        self._experts.watch(groups, trace)

    def refresh(self, groups: Iterable[ParamGroup]) -> None:
        for group in groups:
            group.copies.refresh()

    def use(self, group: ParamGroup, *, backward: bool) -> None:
        if backward:
            self.reductions.reduce_skipped_groups(group.index)
        if not isinstance(group.state, GatheredState):
            return
        if not group.state.is_gathered:
            self._gatherer.gather(group.state)
        upcoming = self._trace.cursor.rest() if backward else self._trace.cursor.upcoming()
        groups = (self._groups[index] for index in upcoming if index < len(self._groups))
        following = next(groups, None)  # is needed next
        if following is not None and isinstance(following.state, GatheredState):
            self._gatherer.expect(following.state, group.state)
        self._gatherer.used(group.state)

    def begin_pass(self) -> None:
        self.finish_pass()
        self.refresh(self._groups)
        self._gatherer.begin_pass()

    def finish_pass(self) -> None:
        self.reductions.finish()

    def empty(self) -> None:
        self._gatherer.begin_pass()
        if self._gatherer.service is not None:  # it may still be sending a shard
            self._gatherer.service.drain(self.ranks.watch.timeout_s)
        self._experts.empty()

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

    def refresh_updated(self) -> None:
        self._gatherer.advance()
        self.refresh(self._groups[index] for index in self.reductions.forward_order)
        self._experts.refresh_updated()

    def note(self, what: str) -> None:
        self.ranks.notes.append(what)

    def moved_nbytes(self) -> dict[str, int]:
        own, theirs = self.collectives.moved_nbytes, self._experts.moved_nbytes()
        names = ("all-gather", "reduce-scatter", "all-reduce")
        return {name: own[name] + theirs.get(name, 0) for name in names}

    def lanes(self) -> list[Lane]:
        return [*(order.lane for order in self.orders()), self.ranks.watch.lane]

    def orders(self) -> list[OrderedWork]:
        own = [self.reductions.thread, *self._experts.orders(), self._gatherer.order]
        return own if self._gatherer.service is None else [*own, self._gatherer.service]

    def ending(self) -> Callable[[], None]:
        orders, ranks = self.orders(), self.ranks

        def end() -> None:
            if getattr(sys, "last_value", None) is None:  # else the process ends with an error
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
            order.end(ranks.watch.timeout_s)


def _close(orders: Sequence[OrderedWork], ranks: Ranks) -> None:
    for order in orders:
        order.close()
    ranks.watch.close()
