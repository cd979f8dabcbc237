"""The work of several ranks with a model's weights: gathering shards, agreeing on writes.

The base class is for one rank alone; `rank_work.py` has several, and their training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from offload.swap.states.state import State
from offload.swap.states.trace import Trace
from offload.swap.threads.lanes import Lane
from offload.swap.threads.ordered import OrderedWork
from offload.swap.threads.transfer import Transfer
from offload.zero.groups.group import ParamGroup
from offload.zero.groups.layout import Layout
from offload.zero.ranks.sharding import ALONE, Sharding

# Elements of a group that have a home here, and of the parts of it that are pieces of their own.
MakeHome = Callable[[int, int, int | None], State]


class RankWeights:
    """The ranks that share a model's weights. This base class is a single rank, which exchanges
    nothing, so that callers need not ask whether there are others."""

    sharding: Sharding = ALONE
    rank = 0
    has_others = False

    def of(self, ep_size: int) -> RankWeights:
        """Return the ranks that share a group: of experts that are spread over `ep_size` ranks
        those that have the same ones."""
        return self

    def parameters(
        self, make: MakeHome, layout: Layout, is_held: Callable[[], bool],
        update: Callable[[], Transfer[None] | None],
    ) -> State:  # fmt: skip
        """Return a group's parameters as the model sees them (arguments: see `GatheredState`)."""
        return make(layout.numel, layout.paged_trainable, None)

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

    def empty(self) -> None:
        """Forget what was gathered; once all ranks have done so, and called it again, no thread
        reads memory."""

    def combine(self, part: torch.Tensor, name: str) -> torch.Tensor:
        """Return the whole tensor, of which each rank passes its part and zeros for the rest."""
        return part

    def refuse_forward_write(self, names: str) -> None:
        """Raise UnsupportedError if other ranks did not see that a forward wrote to `names`."""

    def moved_nbytes(self) -> dict[str, int]:
        """Return the bytes of all buffers that were gathered and reduced with other ranks."""
        return {}

    def lanes(self) -> list[Lane]:
        return []

    def orders(self) -> list[OrderedWork]:
        return []

    def ending(self) -> Callable[[], None]:
        """Return a function that does what `finish` and `close` do, and keeps no model."""
        return lambda: None

    def finish(self) -> None:
        """Wait, before closing, until collectives that all ranks have issued end. Another rank may
        be in one already and wait for this rank. Not after an error."""

    def close(self) -> None:
        """End the threads. Process groups stay until all of the process ends them."""
