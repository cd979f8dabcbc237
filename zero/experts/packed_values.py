"""Values of packed parameters: whole, to be read and written outside of the model, and expert by
expert, for the function that computes them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from offload.swap.threads.shield import defer_signals, ending_with, interrupted_in_waits
from offload.zero.experts.packed import ExpertTable, PackedParam
from offload.zero.groups.shared_views import check_format
from offload.zero.groups.store import WeightStore
from offload.zero.groups.write_tracker import digest


@dataclass(eq=False, repr=False)
class PackedValues:
    """Shows the values of a store's packed parameters, beside the budget: as much memory as their
    values take. For the thread of the model."""

    _store: WeightStore
    _full: Callable[[nn.Parameter], torch.Tensor]  # returns a copy of one row
    _gathered: Callable[[Sequence[nn.Parameter]], AbstractContextManager[None]]  # ... for writing
    _mark_written: Callable[[nn.Parameter], None]  # marks a row's values as written
    _shown: dict[PackedParam, list[int]] = field(default_factory=dict)  # and digests of their rows

    def whole(self, packed: PackedParam) -> torch.Tensor:
        for group, _ in packed.places:
            group.pending_update.begin_missed()
        store = self._store
        made = torch.empty(packed.param.shape, dtype=store.dtype, device=store.device)
        for row, param in zip(made, packed.rows, strict=True):
            row.copy_(self._full(param))
        return made

    @contextmanager
    def shown(self, params: Sequence[PackedParam], *, keep: bool) -> Iterator[None]:
        """Show the values as the parameters' data inside. With `keep`, writes to them are kept."""
        fresh = [packed for packed in params if packed not in self._shown]
        try:
            for packed in fresh:
                self._show(packed)
        except BaseException:
            self._hide(fresh)
            raise
        with ending_with(lambda: self._end(params if keep else [], fresh)):
            yield

    @interrupted_in_waits  # between a switch of torch's modes and its end, one would stay switched
    @torch.no_grad()
    def _show(self, packed: PackedParam) -> None:
        with torch.inference_mode(False):
            values = self.whole(packed)
            self._reveal(packed, values, [digest(row) for row in values])

    @defer_signals
    def _reveal(self, packed: PackedParam, values: torch.Tensor, digests: list[int]) -> None:
        self._shown[packed] = digests
        with torch._C.DisableTorchFunctionSubclass():
            packed.param.data = values
            packed.param.__class__ = packed.own_class
        packed.is_shown = True

    @defer_signals
    def _end(self, kept: Sequence[PackedParam], fresh: Sequence[PackedParam]) -> None:
        try:
            if self._store.unusable is None:  # else there is nothing to write to any more
                self.adopt([packed for packed in kept if packed in self._shown])
        finally:
            self._hide(fresh)

    @defer_signals
    def _hide(self, params: Sequence[PackedParam]) -> None:
        for packed in params:
            if self._shown.pop(packed, None) is not None:
                packed.is_shown = False
                self._store.hide(packed)

    def adopt(self, params: Sequence[PackedParam] | None = None) -> None:
        """Let rows have the values that any rank has written to the shown parameters."""
        for packed in list(self._shown) if params is None else params:
            values = packed.param.detach()
            shape, dtype = packed.spec.shape, self._store.dtype
            check_format(packed.name, values, shape, dtype, values.device)
            now = [digest(row) for row in values]
            pairs = zip(now, self._shown[packed], strict=True)
            changed = [int(digested != known) for digested, known in pairs]
            said = self._store.ranks.exchange(changed, "which experts were written")
            written = said.max(axis=0).tolist()
            for row, value, is_written in zip(packed.rows, values, written, strict=True):
                if is_written:
                    with torch.no_grad(), self._gathered([row]):
                        row.copy_(value)
                elif any(written):
                    self._mark_written(row)  # the master of a row that was written is its values
            self._shown[packed] = now


@dataclass(eq=False, repr=False)
class ExpertAccess:
    """One module's packed experts: those that a router chose are fetched while the first of them
    compute, and each is gathered for as long as it is used. For the thread of the model."""

    _store: WeightStore
    _table: ExpertTable

    def announce(self, experts: Sequence[int]) -> None:
        """Announce the experts that will be used now, in this order."""
        for packed in self._table.packed.values():
            if packed.is_shown:  # within `gathered`: the rows do not have what was written there
                self._store.adopt_changes()
            packed.follow_requires_grad()
        self._store.announce([self._table.groups[expert] for expert in experts])

    @contextmanager
    def using(self, expert: int) -> Iterator[Mapping[str, nn.Parameter]]:
        """Provide one expert's rows, gathered inside, by the names of the module's parameters."""
        with self._store.hooks.expert(self._table.groups[expert]):
            yield self._table.rows_of(expert)
