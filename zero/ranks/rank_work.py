"""The collectives of training: reducing gradients, agreeing on steps.

`OneRank` has the same methods, which do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offload.swap.states.trace import Trace
from offload.swap.threads.lanes import Lane
from offload.swap.threads.ordered import OrderedWork
from offload.zero.gradients.gradients import GradientAccumulator
from offload.zero.groups.group import ParamGroup
from offload.zero.ranks.collectives import Wire
from offload.zero.ranks.rank_weights import OneRankWeights, RankWeights, SharedMemory
from offload.zero.ranks.ranks import Ranks
from offload.zero.ranks.reduction import (
    NoReductions,
    ReducedGradients,
    ReductionMemory,
    Reductions,
)
from offload.zero.ranks.sharding import Part
from offload.zero.step.optimizer_state import Gradients


class OneRank(OneRankWeights):
    """The methods of `RankWork` on a single rank."""

    def __init__(self) -> None:
        self.reductions = NoReductions()
        self.experts: RankWork | None = None

    def refresh_updated(self) -> None:
        """Nothing is out of date."""

    def idle(self) -> None:
        """No other rank has a pass."""

    def gradients(
        self, index: int, part: Part, own: GradientAccumulator,
        make_local: Callable[[], GradientAccumulator], await_update: Callable[[], None],
        *, summed_over_blocks: bool,
    ) -> Gradients:  # fmt: skip
        return own

    def reduce(self, dtype: torch.dtype, *, wait_for_complete_groups: bool) -> NoReductions:
        return self.reductions

    def note_gradient(self) -> None:
        """Nothing is repeated."""

    def note(self, what: str) -> None:
        """There is no other rank to compare with."""


class RankWork(RankWeights):
    """This rank's side of all collectives.

    `experts` is the same of experts that are spread over ranks, where some ranks have the same
    ones: with processes and threads of its own. Their gradients are summed here and reduced in the
    step, since which of them come in backward, and when, depends on tokens.
    """

    def __init__(
        self, ranks: Ranks, memory: SharedMemory, dtype: torch.dtype, wire: Wire, ep_size: int = 1
    ) -> None:
        """`ep_size` is the number of ranks over which experts are spread."""
        super().__init__(ranks, memory, dtype, wire)
        self.experts: RankWork | None = None
        self._exchanges_tokens = ep_size > 1
        same = ranks.same_experts(ep_size) if ep_size > 1 else None
        if same is not None:
            self.experts = RankWork(same, memory, dtype, Wire(wire.reduce_dtype))
        self._memory = memory
        self._reduced: list[ReducedGradients] = []
        self.reductions: Reductions | NoReductions = NoReductions()  # until `reduce`

    # ---------------------------------------------------------------- passes
    def watch(self, groups: Sequence[ParamGroup], trace: Trace) -> None:
        super().watch(groups, trace)
        if self.experts is not None:
            self.experts._groups, self.experts._trace = groups, trace

    def _use(self, group: ParamGroup, *, backward: bool) -> None:
        if backward:
            self.reductions.reduce_skipped_groups(group.index)
        super()._use(group, backward=backward)

    def finish_pass(self) -> None:
        """Note that the model is called again, or a step is taken: a pass in progress is over."""
        self.reductions.finish()
        super().finish_pass()

    def refresh_updated(self) -> None:
        """Call `refresh` for groups that the step in progress updates, in the order of use."""
        self.refresh(self._groups[index] for index in self.reductions.forward_order)
        if self.experts is not None:
            self.experts.refresh_updated()

    def idle(self) -> None:
        """Take part in one forward and backward pass of the other ranks without data."""
        self.finish_pass()
        try:
            self._log.repeat(reduced=self.reductions.synchronising)
            self.reductions.take_nothing()
        finally:
            for group in self._groups:
                group.let_go_all()

    def gradients(
        self, index: int, part: Part, own: GradientAccumulator,
        make_local: Callable[[], GradientAccumulator], await_update: Callable[[], None],
        *, summed_over_blocks: bool,
    ) -> Gradients:  # fmt: skip
        """Return a group's gradients over all ranks, of which `own` accumulates this rank's part
        (see `ReducedGradients`)."""
        made = ReducedGradients(
            index, part, own, make_local, await_update, summed_over_blocks=summed_over_blocks
        )
        self._reduced.append(made)
        return made

    def reduce(self, dtype: torch.dtype, *, wait_for_complete_groups: bool) -> Reductions:
        """Reduce from now on the gradients that `gradients` has made (see `Reductions`)."""
        memory = self._memory
        self.reductions = Reductions(
            self._reduced, self.ranks, self.collectives,
            ReductionMemory(memory.pool, memory.workspace, memory.fences),
            self.collectives.wire.reduce_dtype or dtype, self._log, self._trace,
            wait_for_complete_groups=wait_for_complete_groups,
        )  # fmt: skip
        self.reductions.exchanges_tokens = self._exchanges_tokens
        if self.experts is not None:
            theirs = self.experts.reduce(dtype, wait_for_complete_groups=wait_for_complete_groups)
            theirs.synchronising = False
            self.reductions.experts = theirs
        return self.reductions

    def note_gradient(self) -> None:
        """Note that the pass in progress has a backward."""
        self._log.note_gradient(reduced=self.reductions.synchronising)

    def note(self, what: str) -> None:
        """Note that all ranks should do this now (see `Ranks.note`)."""
        self.ranks.note(what)

    def lanes(self) -> list[Lane]:
        theirs = [] if self.experts is None else self.experts.lanes()
        own = [*super().lanes(), *self.reductions.lanes]
        return list({id(lane): lane for lane in (*own, *theirs)}.values())

    def moved_nbytes(self) -> dict[str, int]:
        found = super().moved_nbytes()
        theirs = {} if self.experts is None else self.experts.moved_nbytes()
        return {name: nbytes + theirs.get(name, 0) for name, nbytes in found.items()}

    # ---------------------------------------------------------------- ending
    def orders(self) -> list[OrderedWork]:
        theirs = [] if self.experts is None else self.experts.orders()
        return [*self.reductions.orders(), *theirs, *super().orders()]

    def _drain(self, timeout_s: float) -> None:
        self.reductions.drain(timeout_s)
        if self.experts is not None:
            self.experts._drain(timeout_s)
        super()._drain(timeout_s)

    def close(self) -> None:
        self.reductions.close()
        if self.experts is not None:
            self.experts.close()
        super().close()


AnyRankWork = OneRank | RankWork
