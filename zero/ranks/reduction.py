"""Gradients of several ranks: summed per group as soon as its last one is there, kept by owner.

    backward     gradient ▶ bucket of its group (whole, 1D)
    complete     reduce-scatter, in an order all ranks agree on, on a thread of its own
                 average of this rank's part ▶ accumulator (1/N of the group)

A *round* is one backward pass that is reduced. In it every group that any rank had gradients of in
the last step is reduced once on every rank, with zeros for gradients that are missing here (of a
parameter that this rank did not use), so that ranks that took different branches issue the same
collectives. Gradients that a round leaves out (passes under `no_sync`, unexpected groups, gradients
that arrived after their group was reduced) add up locally and are reduced in the step, once all
ranks know of them. A parameter that no rank has a gradient of is not updated, as on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import numpy as np
import torch

from offload.kernels.floats import Float
from offload.swap.device.streams import mark_here
from offload.swap.states.state import State
from offload.swap.states.trace import Trace
from offload.swap.threads.ordered import OrderedWork
from offload.swap.threads.transfer import Transfer
from offload.tiers.errors import StateError
from offload.tiers.ledger import StateClass
from offload.tiers.memory_tier import Lease
from offload.zero.gradients.gradients import GradientAccumulator, flat_gradient
from offload.zero.ranks.collectives import Collectives, SharedMemory
from offload.zero.ranks.ranks import Ranks
from offload.zero.ranks.sharding import ALONE, BUCKETS, Part, PartOfParam, Sharding

_MAX_BEHIND = 2  # complete groups that wait for one that may never be complete


class ReducedGradients:
    """Gradients of one group over all ranks, with the methods of a `GradientAccumulator`: `own` has
    this rank's part."""

    def __init__(
        self, reductions: SharedReductions, index: int, part: Part, own: GradientAccumulator,
        make_local: Callable[[], GradientAccumulator], await_update: Callable[[], None],
    ) -> None:  # fmt: skip
        """`await_update` waits until no update reads the last reduction's result. `make_local`
        makes an accumulator of the whole group, for gradients that are not reduced yet."""
        self._reductions = reductions
        self.index = index
        self.name = own.name
        self.parts: list[PartOfParam] = list(part.trained())
        self._numbers = {part.index: number for number, part in enumerate(self.parts)}
        self.specs = [spec for spec in part.layout.params if spec.trainable]
        self.numel = part.layout.numel_trainable
        self.own = own
        self._make_local = make_local
        self.await_update = await_update
        self.local: GradientAccumulator | None = None
        count = len(self.specs)
        self.passes = np.zeros(count, dtype=np.int64)  # > 0: some rank has a gradient, this step
        self.had = np.zeros(count, dtype=bool)  # this rank, by the end of the last round
        # of the round under way
        self.arrived = np.zeros(count, dtype=bool)
        self.awaited = np.ones(count, dtype=bool)  # what arrived here in the last round
        self.bucket: Lease | None = None
        self.issued = False
        self.submitted = False  # something was reduced since the last `clear`
        self.when_issued: Callable[[], None] | None = None
        self.landed: Transfer[None] = Transfer.completed(None)

    # ---------------------------------------------------------------- as the update sees it
    @property
    def state(self) -> State:
        return self.own.state

    @property
    def format(self) -> Float:
        return self.own.format

    @property
    def is_reduced_locally(self) -> bool:
        return self.landed.done()

    @property
    def has_any(self) -> bool:
        return bool(self.passes.any())

    @property
    def holds_any(self) -> bool:
        return self.submitted or self.has_any

    def close(self) -> bool:
        return False  # each reduction sends the accumulator home, and leaves nothing open

    def settle(self) -> None:
        self.landed.wait()
        for each in (self.own, self.local):
            if each is not None:
                each.settle()

    def square(self, index: int) -> float:
        return self.own.square(self._numbers[index]) if index in self._numbers else 0.0

    @property
    def spent(self) -> bool:
        return self.own.spent

    def write(self, index: int, value: torch.Tensor) -> None:
        self.landed.wait()
        self.passes[index] = 1
        self.submitted = True
        if index in self._numbers:
            number = self._numbers[index]
            part = self.parts[number]
            self.own.write(number, value.reshape(-1)[part.start : part.start + part.spec.numel])
            self.landed = self.own.landed

    def scale(self, index: int, factor: float) -> None:
        if index in self._numbers:
            self.own.scale(self._numbers[index], factor)

    def factor(self, index: int) -> float:
        return self.own.factor(self._numbers[index]) if index in self._numbers else 1.0

    def drop(self, indices: Sequence[int]) -> None:
        self.landed.wait()
        self.passes[indices] = 0
        self.own.drop([self._numbers[index] for index in indices if index in self._numbers])
        if self.local is not None:
            self.local.drop(indices)

    def spend(self) -> None:
        self.landed.wait()
        self.own.spend()

    def read(self, index: int) -> torch.Tensor | None:
        there = index in self._numbers and self.passes[index]
        return self.own.read(self._numbers[index]) if there else None

    def clear(self) -> None:
        self.landed.wait()
        self.submitted = False
        self.passes[:] = 0
        self.own.clear()
        self.forget_local()

    def add(self, index: int, gradient: torch.Tensor) -> bool:
        return self._reductions.take(self, index, gradient)

    def keep(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to those that this rank has for itself."""
        if self.local is None:
            self.local = self._make_local()
        self.local.add(index, gradient)
        self.passes[index] = 1

    def forget_local(self) -> None:
        if self.local is not None:
            self.local.clear()
            self.local.state.close()
            self.local = None

    @property
    def is_complete(self) -> bool:
        return bool(self.arrived.any() and (self.arrived >= self.awaited).all())

    def begin_round(self) -> None:
        self.had |= self.arrived
        if self.arrived.any():
            self.awaited = self.arrived.copy()
        self.arrived[:] = False
        self.issued = False


Gradients = GradientAccumulator | ReducedGradients  # one rank's, or those of several ranks


class Reductions:
    """All groups' reductions of one rank; this base class is a single rank, whose gradients need
    none. For the thread that runs backward, and `agree` and `finish` for that of the model."""

    has_others = False
    sharding: Sharding = ALONE
    synchronising = True  # False inside `no_sync`

    def add(
        self, index: int, part: Part, own: GradientAccumulator,
        make_local: Callable[[], GradientAccumulator], await_update: Callable[[], None],
    ) -> Gradients:  # fmt: skip
        """Return another group's gradients over all ranks, of which `own` accumulates this rank's
        part (see `ReducedGradients`)."""
        return own

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside add up here alone; the next one outside, or the step, reduces."""
        return nullcontext()

    @property
    def forward_order(self) -> Sequence[int]:
        """The groups reduced in the last step, roughly in order of use: the same on every rank."""
        return ()

    def when_issued(self, index: int, begin: Callable[[], None]) -> None:
        """Call `begin` as soon as the reduction of a complete group is on its way: what waits for
        it before that could wait for ever."""
        begin()

    def clear(self, group_index: int, indices: Sequence[int]) -> None:
        """Note that users clear gradients of these, between rounds: all ranks, or the next exchange
        raises RankError."""

    def finish(self) -> None:
        """End the backward pass in progress: reduce the rest of its round."""

    def agree(self, use: str, name: str = "") -> None:
        """Agree once per step, on every rank: all gradients that any rank has are reduced, and all
        ranks know which parameters have some. `use` of them is the same on all ranks; `name` of one
        is for errors."""

    def discard(self) -> None:
        """Drop gradients instead of a step: the round in progress is reduced all the same."""

    def all_squares(self, squares: list[float]) -> np.ndarray:
        """Return the sums of squares of parameters' parts on all ranks, one row each."""
        return np.array([squares])

    def await_progress(self, *, in_backward: bool) -> bool:
        """Wait for a reduction in progress, or begin one that others wait behind: for a pool that
        is out of room. `in_backward`: the caller runs the backward pass."""
        return False


class SharedReductions(Reductions):
    has_others = True

    def __init__(
        self, ranks: Ranks, collectives: Collectives, memory: SharedMemory, dtype: torch.dtype,
        summed_dtype: torch.dtype, experts: Reductions, *, wait_for_complete_groups: bool,
        exchanges_tokens: bool,
    ) -> None:  # fmt: skip
        """`dtype` is that of contributions, `summed_dtype` that of sums of several passes.
        `experts` are reduced among the ranks with the same ones. `wait_for_complete_groups`: a
        group is updated as soon as it is reduced, so it should not be reduced before all its
        gradients are there.

        `exchanges_tokens`: within backward ranks wait for each other's tokens. One that waited here
        for a group that another rank does not use would never come to send them; so more buckets
        are taken, as many as there is memory for."""
        self._groups: list[ReducedGradients] = []
        self._of: dict[int, ReducedGradients] = {}  # by the index of a group
        self.trace: Trace  # has what this pass has used; set before the first pass
        self._experts = experts
        self._exchanges_tokens = exchanges_tokens
        self._ranks = ranks
        self._collectives = collectives
        self._memory = memory
        self._dtype = dtype
        self._summed_dtype = summed_dtype
        self._wait_for_complete_groups = wait_for_complete_groups
        self.thread = OrderedWork("offload-reduce", ranks.device)
        self.sharding = ranks.sharding
        self._order: list[int] = []
        self._places: dict[int, int] = {}  # in it, of groups
        self._is_agreed = False  # ... on all ranks
        self._issuing = False
        self._place = 0  # in the order: everything before it was issued in this round
        self._arrivals: dict[int, None] = {}  # groups in the order of their last gradients
        self._open = False
        self._kept_passes = False  # some pass of this step was not reduced, here as on all ranks

    def add(
        self, index: int, part: Part, own: GradientAccumulator,
        make_local: Callable[[], GradientAccumulator], await_update: Callable[[], None],
    ) -> ReducedGradients:  # fmt: skip
        made = ReducedGradients(self, index, part, own, make_local, await_update)
        self._groups.append(made)
        self._of[index] = made
        return made

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.finish()
        before, self.synchronising = self.synchronising, False
        try:
            yield
        finally:
            self.synchronising = before

    def take(self, group: ReducedGradients, index: int, gradient: torch.Tensor) -> bool:
        """Take a gradient of parameter `index`. Returns False if it is reduced in the step only."""
        if not self.synchronising:
            self._kept_passes = True
            group.keep(index, gradient)
            return False
        if group.arrived[index]:
            self.finish()  # another pass has begun
        self._begin_round()
        group.arrived[index] = True
        self._arrivals.pop(group.index, None)  # also for a gradient that comes after its place
        self._arrivals[group.index] = None
        if group.issued and self._wait_for_complete_groups:
            raise StateError(
                f"optimizer.in_backward: the gradient of {group.specs[index].name} came after its "
                "group was reduced, and other ranks, whose batches use other modules, may have "
                "updated it without this gradient; set optimizer.in_backward: false"
            )
        if group.issued or group.index not in self._places:
            group.keep(index, gradient)
            return False
        spec = group.specs[index]
        self._bucket(group)[spec.offset : spec.stop].copy_(flat_gradient(gradient))
        group.passes[index] = 1
        if group.is_complete:
            self._issue_ready()
        return True

    def reduce_skipped_groups(self, index: int) -> None:
        """Backward uses the group `index` now: reduce the groups two places before it that this
        pass does not use again, complete or not. A rank that took another branch got no gradients
        there, and must not keep the others waiting: they have already gathered all that this rank
        needs to come here."""
        gathers = self.sharding.parameters
        if not self.synchronising or not (self._open or gathers):
            return
        self._begin_round()
        while self._place + BUCKETS <= self._places.get(index, 0):
            if not self.trace.is_over(self._order[self._place]):
                return
            self._issue_head()

    def _begin_round(self) -> None:
        if self._open:
            return
        self._open = True
        if not self._is_agreed:
            self._agree_on_first_order()

    def _agree_on_first_order(self) -> None:
        """Set the first order, of the first rank: gradients come in the reverse of the order of
        first uses, and then those of groups whose use was not seen."""
        used = [
            index for index in self.trace.first_uses()
            if index in self._of and self._of[index].specs
        ]  # fmt: skip
        rest = [group.index for group in reversed(self._groups) if group.specs]
        order = list(dict.fromkeys([*reversed(used), *rest]))
        self._put_in_order(self._ranks.exchange(order, "the order of gradients")[0].tolist())

    def clear(self, group_index: int, indices: Sequence[int]) -> None:
        group = self._of.get(group_index)
        if group is None:  # an expert that other ranks do not have, or some
            self._experts.clear(group_index, indices)
            return
        for index in indices:
            if group.had[index]:
                group.had[index] = False
                self._ranks.notes.append(f"{group.specs[index].name}.grad is cleared")

    def _put_in_order(self, order: list[int]) -> None:
        self._order = order
        self._places = {index: place for place, index in enumerate(order)}
        self._is_agreed = True

    def _bucket(self, group: ReducedGradients) -> torch.Tensor:
        dtype = self._summed_dtype if self._kept_passes else self._dtype
        if group.bucket is None:
            group.await_update()
            group.landed.wait()
            begun = sum(other.bucket is not None for other in self._groups)
            while self.thread.pending + begun >= BUCKETS and not self._exchanges_tokens:
                # one bucket is filled while another one is reduced: so much is planned for
                if not self.thread.await_oldest():
                    break
            nbytes = group.numel * dtype.itemsize
            name = f"{group.name}, to be reduced"
            group.bucket = self._memory.pool.demand(nbytes, name, StateClass.STAGING)
            for mark in self._memory.fences.claim(group.bucket.extent):
                mark.before_compute()
            group.landed = Transfer(f"the reduction of {group.name}", self.thread.lane)
        return group.bucket.tensor.view(dtype)[: group.numel]

    def _issue_ready(self) -> None:
        while self._place < len(self._order):
            head = self._of[self._order[self._place]]
            if not head.is_complete:
                later = self._order[self._place + 1 :]
                behind = sum(self._of[index].is_complete for index in later)
                if self._wait_for_complete_groups or behind < _MAX_BEHIND:
                    return
            self._issue_head()

    def _issue_head(self) -> None:
        head = self._of[self._order[self._place]]
        self._place += 1
        self._issuing = True
        try:
            self._issue(head)
        finally:
            self._issuing = False

    def _issue(self, group: ReducedGradients) -> None:
        """Reduce what is there of a group, with zeros for the rest."""
        bucket = self._bucket(group)
        for index, spec in enumerate(group.specs):
            place = bucket[spec.offset : spec.stop]
            here = group.bucket is not None and group.arrived[index]
            local = group.local if self._kept_passes else None
            kept = None if local is None else local.read(index)
            if kept is not None:
                kept = kept.reshape(-1).to(bucket.device)
                place.copy_(place + kept if here else kept)
            elif not here:
                place.zero_()
        if self._kept_passes:
            group.forget_local()
        group.issued = group.submitted = True
        self._submit(group, bucket)
        if group.when_issued is not None:
            begin, group.when_issued = group.when_issued, None
            begin()

    def when_issued(self, index: int, begin: Callable[[], None]) -> None:
        group = self._of.get(index)
        if group is None or group.issued:
            begin()
        else:
            group.when_issued = begin

    def _submit(self, group: ReducedGradients, bucket: torch.Tensor) -> None:
        lease, group.bucket = group.bucket, None
        assert lease is not None, "the bucket's"
        landed, ready = group.landed, mark_here(self._ranks.device)

        def reduce(bucket: torch.Tensor) -> None:
            ready.before_compute()
            own = self._collectives.reduce(bucket, self._memory.workspace, group.name)
            for number, part in enumerate(group.parts):
                group.own.add(number, own[part.spec.offset : part.spec.stop])
            group.own.close()
            self._memory.fences.retire(lease.extent, (mark_here(self._ranks.device),))

        def settle(ended: Transfer[None]) -> None:
            with self._memory.pool.lock:
                lease.free()
            if ended.failure is not None:
                landed.spread(ended.failure)
            else:
                group.own.landed.then(lambda _: landed.complete(None))

        ended = self.thread.submit(f"the reduce-scatter of {group.name}", partial(reduce, bucket))
        ended.then(settle)

    def finish(self) -> None:
        if not self._open:
            return
        while self._place < len(self._order):
            self._issue_head()
        for group in self._groups:
            group.begin_round()
        self._place = 0
        self._open = False

    def agree(self, use: str, name: str = "") -> None:
        self.finish()
        what = f"which gradients there are before {use}"
        self._take_over(self._ranks.exchange(self._what_is_here(), what, name))
        for group in self._groups:
            group.landed.wait()
        self._experts.agree(use, name)  # not before: it has the same workspace

    def _what_is_here(self) -> list[int]:
        present = [int(passes > 0) for group in self._groups for passes in group.passes]
        kept = [int(group.local is not None) for group in self._groups]
        place = {index: number for number, index in enumerate(self._order_now())}
        return [*present, *kept, *(place.get(g.index, len(place)) for g in self._groups)]

    def _order_now(self) -> list[int]:
        """Return the groups in the order of their last gradients; one without any stays behind the
        group that it was behind."""
        order = list(self._arrivals)
        before: int | None = None
        for index in self._order or [group.index for group in reversed(self._groups)]:
            if index not in self._arrivals:
                order.insert(0 if before is None else order.index(before) + 1, index)
            before = index
        return order

    def _take_over(self, rows: np.ndarray) -> None:
        """Take over `rows`, the messages of all ranks, by rank."""
        anywhere, count = rows.max(axis=0), len(self._groups)
        numbers = [group.index for group in self._groups]
        kept = dict(zip(numbers, anywhere[-2 * count : -count].tolist(), strict=True))
        places = dict(zip(numbers, rows[0][-count:].tolist(), strict=True))
        start = 0
        for group in self._groups:
            stop = start + len(group.specs)
            group.passes[:] = anywhere[start:stop]
            start = stop
        self._kept_passes = True  # the rest is reduced in fp32 and added
        for group in self._groups:
            if kept[group.index]:
                self._issue(group)
                group.begin_round()
        for group in self._groups:  # updates in backward use them up, not at once on all ranks
            group.had = (group.passes > 0) & (not self._wait_for_complete_groups)
        self._kept_passes = False
        self._arrivals.clear()
        used = [group.index for group in self._groups if group.has_any]
        if used:  # a step without any gradients says nothing of the next one
            self._put_in_order(sorted(used, key=lambda index: (places[index], -index)))

    @property
    def forward_order(self) -> Sequence[int]:
        return self._order[::-1]

    def discard(self) -> None:
        for group in self._groups:
            group.when_issued = None  # nothing is updated with it
        self.finish()
        for group in self._groups:
            group.had[:] = False
        if not self._wait_for_complete_groups:
            self._ranks.notes.append("all gradients are cleared")
        self._kept_passes = False
        self._arrivals.clear()
        self._experts.discard()

    def all_squares(self, squares: list[float]) -> np.ndarray:
        return self._ranks.exchange_sums(squares)

    def await_progress(self, *, in_backward: bool) -> bool:
        if self.thread.await_oldest():
            return True
        if self._experts.await_progress(in_backward=False):
            return True
        left = self._order[self._place :]
        if not in_backward or self._issuing:
            return False
        if not left or self._of[left[0]].bucket is None:
            return False
        if self._wait_for_complete_groups and not self.trace.is_over(left[0]):
            return False
        self._issue_head()
        return True
