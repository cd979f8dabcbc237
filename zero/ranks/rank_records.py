"""Each rank's published record, for the others to read when a collective fails.

    rank 0  ── beat 41, in the all-gather of blocks.3 ──▶ ┌───────┐
    rank 1  ── beat 40, in nothing ─────────────────────▶ │ store │ ◀── read when a collective fails
    rank 2  ── beat 12, left: BudgetError ... ──────────▶ └───────┘

The store is that of the process group, which every rank has reached before. A record is replaced by
the next one (a `FileStore` alone keeps all of them: some 20 MB per rank and day). While all is well
no rank reads them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's record."""

    beat: int  # counts up while the rank lives
    doing: Sequence[str] = ()  # the collectives that it is in
    left: str | None = None  # why, "" if it has simply closed its engine

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> RankRecord:
        return cls(**json.loads(text))


class RankRecords:
    """The records of all ranks that made the same engine. Calls may block for as long as the
    process behind the store is stopped, and raise RuntimeError once it is gone."""

    def __init__(self, store: Store, rank: int) -> None:
        """Every rank makes its engines in the same order: their number tells them apart."""
        self.store = _without_prefix(store)
        self._rank = rank
        number = self.store.add(f"offload/engines/{rank}", 1)
        self._prefix = f"offload/records/{number}"
        # A client does one thing at a time: one that is stuck must not keep the other from it, nor
        # the process group.
        self._publishing, self._reading = _client(self.store), _client(self.store)

    def publish(self, record: RankRecord) -> None:
        """Publish a record. For one thread."""
        self._publishing.set(f"{self._prefix}/{self._rank}", record.to_text())

    def read(self, rank: int) -> RankRecord | None:
        """Return a rank's last record, None if there is none. For one thread."""
        key = f"{self._prefix}/{rank}"
        there = self._reading.check([key])
        return RankRecord.from_text(self._reading.get(key)) if there else None


def _without_prefix(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _client(store: Store) -> Store:
    if isinstance(store, FileStore):
        # One that was told the number of ranks removes the file when as many have ended.
        return FileStore(store.path, -1)  # type: ignore[attr-defined]
    clone: Store = store.clone()  # type: ignore[attr-defined]
    return clone
