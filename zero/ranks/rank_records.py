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
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)


@dataclass(frozen=True, slots=True)
class Activity:
    """A collective that a rank is in, or has been in."""

    lane: str  # collectives of one lane begin one after another, alike on all ranks
    number: int  # in its lane, from 1
    what: str  # "the all-gather of blocks.3"
    since: float  # seconds since the epoch: when it began, or ended


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's record."""

    beat: int  # counts up while the rank lives
    at: float  # seconds since the epoch, by its own clock
    doing: tuple[Activity, ...] = ()  # the oldest first
    begun: Mapping[str, int] = field(default_factory=dict)  # the number of the last one, by lane
    last: Activity | None = None  # the last that ended
    left: str | None = None  # why, "" if it has simply closed its engine
    blames: tuple[int, ...] = ()  # ranks that it found missing itself

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> RankRecord:
        raw: dict[str, Any] = json.loads(text)
        raw["doing"] = tuple(Activity(**each) for each in raw["doing"])
        raw["last"] = Activity(**raw["last"]) if raw["last"] else None
        raw["blames"] = tuple(raw["blames"])
        return cls(**raw)


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

    def host(self) -> int | None:
        """Return the rank whose process hosts the store; None if no rank does."""
        by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return 0 if isinstance(self.store, TCPStore) and not by_launcher else None

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
