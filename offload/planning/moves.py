"""What an action of a step moves: bytes over each link; and the chunks of an update."""

from __future__ import annotations

from dataclasses import dataclass

from offload.planning.plan import Plan
from offload.planning.step_program import Action
from offload.tiers.extent import TierName

_MOST_CHUNKS = 1000  # that are looked at one by one


@dataclass(slots=True)
class Bytes:
    """Over each link, and requests of nvme."""

    read: int = 0
    written: int = 0
    to_device: int = 0
    to_host: int = 0
    requests: int = 0

    def add(self, other: Bytes) -> None:
        self.read += other.read
        self.written += other.written
        self.to_device += other.to_device
        self.to_host += other.to_host
        self.requests += other.requests


@dataclass(frozen=True, slots=True)
class Fetch:
    """Parameters asked for by an action: for its own group, or ahead."""

    group: int
    read_nbytes: int
    to_device_nbytes: int


@dataclass(frozen=True, slots=True)
class Move:
    """An action with all bytes that it moves. What a use fetches is told by group, too."""

    action: Action
    nbytes: Bytes
    fetches: tuple[Fetch, ...] = ()


@dataclass(slots=True)
class Chunk:
    """A chunk of a group, or neighbouring ones where there are very many."""

    tier: TierName  # of its record
    record_nbytes: int
    numel: int
    count: int = 1


def chunks_of(plan: Plan) -> list[list[Chunk]]:
    """The chunks of every group, joined where all of them together would be too many."""
    together = -(-sum(len(group.records) for group in plan.groups) // _MOST_CHUNKS)
    found = []
    for group, tiers in zip(plan.groups, plan.records, strict=True):
        chunks: list[Chunk] = []
        left = group.layout.shard_trainable
        for nbytes, tier in zip(group.records, tiers, strict=True):
            numel = min(plan.chunk_numel, left)
            left -= numel
            if chunks and chunks[-1].tier is tier and chunks[-1].count < together:
                last = chunks[-1]
                last.record_nbytes += nbytes
                last.numel += numel
                last.count += 1
            else:
                chunks.append(Chunk(tier, nbytes, numel))
        found.append(chunks)
    return found
