"""Packed experts, for the function that computes them: those that a router chose are brought while
the first of them compute, and each is gathered for as long as it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from offload.zero.experts.packed import ExpertTable
from offload.zero.groups.store import WeightStore


class ExpertAccess:
    """One module's experts. For the thread of the model."""

    def __init__(self, store: WeightStore, table: ExpertTable) -> None:
        self._store = store
        self._table = table

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
        with self._store.expert(self._table.groups[expert]):
            yield self._table.rows_of(expert)
