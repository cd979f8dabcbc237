"""Lazy updates of packed parameters: steps that rows have missed, made when they are next needed.

Plain PyTorch updates a packed parameter as a whole: in a step in which an expert got no token, its
rows have a gradient of zeros, and all the same decay and move on by their momentum. Here each
expert is a group of its own, and that step is only noted:

    step               k        k + 1      k + 2      k + 3
    numbers noted      a        b          c          d
    expert 0        gradient    .          .       gradient: update with b, c (zeros) and d
    expert 1           .        .       read: update with a, b (zeros)      ... c, d later

The numbers of a step (learning rate and so on) are noted once for all experts of a module; each
group counts from which step on it lacks them, and steps that no group lacks are forgotten. Making
them later gives the same bits: `kernels.cpu.optimizer` says how, and the count of steps, on which
bias corrections and the bits of stochastic rounding depend, goes on as if they had been made. (Lazy
updates of sparse rows elsewhere, as of `torch.optim.SparseAdam`, leave such steps out.)
"""

from collections.abc import Collection, Sequence
from functools import lru_cache

import numpy as np

from offload.kernels.rules import Scalars
from offload.zero.experts.packed import ExpertTable, PackedParam
from offload.zero.groups.group import ParamGroup
from offload.zero.step.optimizer_state import Hyper, HyperOf, OptimizerState

MAX_MISSED = 1024  # steps after which an unused group is updated all the same, to bound the memory

# By table: the hyperparameters of each trainable parameter of an expert, None for one that the step
# leaves alone. Tables that it leaves alone as a whole are not in it.
_Step = dict[int, list[Hyper | None]]
# By parameter: numbers and counts of its updates with a gradient of zeros, the oldest first.
ZeroUpdates = dict[int, list[tuple[Scalars, int]]]


class LazyUpdates:
    """The steps that the groups of packed `tables` have missed. For the thread of the model."""

    def __init__(
        self, states: Sequence[OptimizerState], tables: Sequence[ExpertTable], *, alone: bool
    ) -> None:
        """`alone`: no other rank has gradients of the same parameters."""
        self._states = states
        self._tables = [table for table in tables if table.packed]
        self._table_of = {
            group.index: number
            for number, table in enumerate(self._tables) for group in table.groups
        }  # fmt: skip
        self._alone = alone
        self._steps: list[_Step] = []
        self._first = 0  # the number of the first of them, counted from the first step of all
        self._lacks: dict[int, int] = {}  # by group: the number of the first step that it missed
        self._now: _Step = {}  # the step under way

    @property
    def _end(self) -> int:
        return self._first + len(self._steps)

    def begin_step(self, hyper_of: HyperOf) -> None:
        for number, table in enumerate(self._tables):
            step: list[Hyper | None] = [None] * len(self._states[table.groups[0].index].steps)
            for packed in table.packed.values():
                index = packed.places[0][1]  # the same in all groups
                if packed.spec.trainable and self._has_gradient(packed):
                    step[index] = hyper_of(packed.rows[0])  # all rows are in its param group
            if any(hyper is not None for hyper in step):
                self._now[number] = step

    def _has_gradient(self, packed: PackedParam) -> bool:
        """Return whether plain PyTorch's parameter would have a gradient, if only of zeros. On
        several ranks, they have agreed on the rows' gradients."""
        if self._alone and packed.has_gradient:
            return True
        states = self._states
        return any(states[group.index].gradients.passes[index] for group, index in packed.places)

    def end_step(self, having: Collection[int]) -> list[ParamGroup]:
        """Note that groups not among `having` missed the step; return those that had missed none
        before."""
        step, self._now = self._now, {}
        number, fallen = self._end, []
        self._steps.append(step)
        for table, hypers in step.items():
            counts = np.array([hyper is not None for hyper in hypers], dtype=np.int64)
            for group in self._tables[table].groups:
                if group.index in having:
                    continue
                self._states[group.index].steps += counts
                if group.index not in self._lacks:
                    self._lacks[group.index] = number
                    fallen.append(group)
        self._forget_made()
        return fallen

    def _forget_made(self) -> None:
        first = min(self._lacks.values(), default=self._end)
        del self._steps[: first - self._first]
        self._first = first

    def take(self, state: OptimizerState, graded: Collection[int] | None = None) -> ZeroUpdates:
        """Return all that a group has missed, which the caller is about to make. With `graded`,
        before an update of these parameters with gradients; then the step in progress for the
        others, too."""
        table = self._table_of.get(state.group.index)
        if table is None:
            return {}
        first = self._lacks.pop(state.group.index, self._end)
        missed = [step[table] for step in self._steps[first - self._first :] if table in step]
        now = self._now.get(table) if graded is not None else None
        updates: ZeroUpdates = {}
        for index, count in enumerate(state.steps.tolist()):
            hypers = [step[index] for step in missed if step[index] is not None]
            start = count - len(hypers) + 1  # missed steps were counted when they were due
            if now is not None and now[index] is not None and index not in (graded or ()):
                hypers.append(now[index])
                state.steps[index] = count + 1
            if hypers:
                updates[index] = [
                    (_numbers(hyper, number), number)
                    for number, hyper in enumerate(hypers, start) if hyper is not None
                ]  # fmt: skip
        self._forget_made()
        return updates

    def lacks(self, state: OptimizerState) -> bool:
        return state.group.index in self._lacks

    def overdue(self) -> list[ParamGroup]:
        """Return groups that should not miss more: they have missed many, or parts of them are
        updated by other ranks, which do not know when this one needs them."""
        return [
            group for group in self.behind()
            if group.layout.ranks > 1 or self._end - self._lacks[group.index] > MAX_MISSED
        ]  # fmt: skip

    def behind(self) -> list[ParamGroup]:
        return [self._states[index].group for index in self._lacks]


@lru_cache(maxsize=4 * MAX_MISSED)  # experts of all layers ask for the same
def _numbers(hyper: Hyper, step: int) -> Scalars:
    """Return the numbers of an update with a zero gradient: clipping and loss scale change none."""
    return hyper.scalars(step, 1.0)
