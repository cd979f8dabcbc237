"""The collectives of training: reducing gradients, agreeing on steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offload.swap.states.trace import Trace
from offload.swap.threads.ordered import OrderedWork
from offload.zero.gradients.gradients import GradientAccumulator
from offload.zero.groups.group import ParamGroup
from offload.zero.ranks.rank_weights import RankWeights, SharedMemory, SharedWeights
from offload.zero.ranks.ranks import Ranks
from offload.zero.ranks.reduction import (
    Gradients,
    ReducedGradients,
    Reductions,
    SharedReductions,
)
from offload.zero.ranks.sharding import Part


class RankWork(RankWeights):
    """The ranks that train a model together; this base class is a single rank."""

    def __init__(self) -> None:
        self.reductions = Reductions()

    def of(self, ep_size: int) -> RankWork:
        return self

    def refresh_updated(self) -> None:
        """Call `refresh` for groups that the step in progress updates, in the order of use."""

    def gradients(
        self, index: int, part: Part, own: GradientAccumulator,
        make_local: Callable[[], GradientAccumulator], await_update: Callable[[], None],
    ) -> Gradients:  # fmt: skip
        """Return a group's gradients over all ranks, of which `own` accumulates this rank's part
        (see `ReducedGradients`)."""
        return own

    def reduce(self, dtype: torch.dtype, *, wait_for_complete_groups: bool) -> Reductions:
        """Reduce from now on the gradients that `gradients` has made (see `SharedReductions`)."""
        return self.reductions

    def note(self, what: str) -> None:
        """Note that all ranks should do this now (see `Ranks.note`)."""


class SharedWork(SharedWeights, RankWork):
    """This rank's side of all collectives.

    Those of experts that are spread over ranks, where some ranks have the same ones, have process
    groups and threads of their own. Their gradients are summed here and reduced in the step, since
    which of them come in backward, and when, depends on tokens.
    """

    def __init__(
        self, ranks: Ranks, memory: SharedMemory, dtype: torch.dtype,
        reduce_dtype: torch.dtype | None = None, ep_size: int = 1,
    ) -> None:  # fmt: skip
        """`reduce_dtype` is the format that gradients are rounded to before they travel, if any;
        `ep_size` the number of ranks over which experts are spread."""
        super().__init__(ranks, memory, dtype)
        self._reduce_dtype = reduce_dtype
        self._exchanges_tokens = ep_size > 1
        same = ranks.same_experts(ep_size) if ep_size > 1 else None
        self._experts = (
            RankWork() if same is None else SharedWork(same, memory, dtype, reduce_dtype)
        )
        self._memory = memory
        self._reduced: list[ReducedGradients] = []
        self.reductions = Reductions()  # until `reduce`

    def of(self, ep_size: int) -> RankWork:
        return self if ep_size == 1 else self._experts

    # ---------------------------------------------------------------- passes
    def watch(self, groups: Sequence[ParamGroup], trace: Trace) -> None:
        super().watch(groups, trace)
        self._experts.watch(groups, trace)

    def use(self, group: ParamGroup, *, backward: bool) -> None:
        if backward:
            self.reductions.reduce_skipped_groups(group.index)
        super().use(group, backward=backward)

    def finish_pass(self) -> None:
        self.reductions.finish()

    def refresh_updated(self) -> None:
        self.refresh(self._groups[index] for index in self.reductions.forward_order)
        self._experts.refresh_updated()

    def gradients(
        self, index: int, part: Part, own: GradientAccumulator,
        make_local: Callable[[], GradientAccumulator], await_update: Callable[[], None],
    ) -> Gradients:  # fmt: skip
        made = ReducedGradients(index, part, own, make_local, await_update)
        self._reduced.append(made)
        return made

    def reduce(self, dtype: torch.dtype, *, wait_for_complete_groups: bool) -> SharedReductions:
        made = SharedReductions(
            self._reduced, self.ranks, self.collectives,
            self._memory,
            self._reduce_dtype or dtype, self._reduce_dtype or torch.float32, self._trace,
            wait_for_complete_groups=wait_for_complete_groups,
        )  # fmt: skip
        made.exchanges_tokens = self._exchanges_tokens
        made.experts = self._experts.reduce(
            dtype, wait_for_complete_groups=wait_for_complete_groups
        )
        made.experts.synchronising = False
        self.reductions = made
        return made

    def note(self, what: str) -> None:
        self.ranks.note(what)

    def moved_nbytes(self) -> dict[str, int]:
        found, theirs = super().moved_nbytes(), self._experts.moved_nbytes()
        return {name: nbytes + theirs.get(name, 0) for name, nbytes in found.items()}

    # ---------------------------------------------------------------- ending
    def orders(self) -> list[OrderedWork]:
        return [*self.reductions.orders(), *self._experts.orders(), *super().orders()]
