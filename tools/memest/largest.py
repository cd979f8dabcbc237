"""The largest model of a family that given hardware trains, under each system: `memest max`.

Found by bisection over the family's ladder of shapes; no search, no chance, well under a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from offload.planning.estimate import PlaceEstimate
from offload.planning.workload import Workload
from offload.tiers.errors import ConfigError
from offload.tiers.extent import TierName
from offload.tools.memest.ladders import (
    FamilyName,
    Shape,
    facts_of,
    ladder,
    model_of,
    subject_from,
)
from offload.tools.memest.profiles import HardwareProfile
from offload.tools.memest.room import Room, places_of, room_of, too_full
from offload.tools.memest.subject import Ranks, ranks_of
from offload.tools.memest.systems import OTHERS, Numbers, System, memory_of
from offload.tools.memest.systems_ours import EVEN_SHARDS, plan_ours

WORKLOAD = Workload(batch=1, sequence=2048)
_LEAST_EXPERTS = 8


@dataclass(frozen=True)
class Trial:
    """A system with one model on some hardware."""

    places: Mapping[TierName, PlaceEstimate]
    full: tuple[TierName, ...]  # places that cannot hold their part


@dataclass(frozen=True)
class Largest:
    """The answer for one system."""

    system: System
    shape: Shape | None  # None: not even the smallest of the family fits
    places: Mapping[TierName, PlaceEstimate]  # with that model; without one, with the smallest
    bound: tuple[TierName, ...]  # what the next larger model does not fit into
    note: str = ""

    @property
    def numel(self) -> int:
        return self.shape.numel if self.shape else 0


Try = Callable[[Shape], Trial]


def largest(
    family: str, profile: HardwareProfile, system: System, workload: Workload = WORKLOAD
) -> Largest:
    """bf16 with Adam, every block recomputed, fused attention. ConfigError for no such family."""
    ranks = ranks_of(profile)
    name = _family(family)
    experts = max(_LEAST_EXPERTS, ranks.count) if name is FamilyName.MOE else 0
    if experts:
        ranks = Ranks(ranks.per_node, ranks.nodes, experts=math.gcd(experts, ranks.count))
    room = room_of(profile)
    if system is System.OURS:
        trial = _ours(workload, ranks, room)
    else:
        trial = _other(system, workload, ranks, room, scores=False)
    note = EVEN_SHARDS if system is System.OURS and ranks.count > 1 else ""
    return search(system, ladder(name, experts), trial, note)


def largest_of_all(
    family: str, profile: HardwareProfile, workload: Workload = WORKLOAD
) -> list[Largest]:
    """Every system, ours last."""
    return [largest(family, profile, system, workload) for system in (*OTHERS, System.OURS)]


def largest_shape(
    system: System, family: FamilyName, ranks: Ranks, room: Room, workload: Workload, *,
    scores: bool,
) -> Largest:  # fmt: skip
    """As `largest`, for any way of spreading a model over GPUs, with attention scores or without.
    Not for `System.OURS`."""
    experts = ranks.experts if family is FamilyName.MOE else 0
    return search(
        system, ladder(family, experts), _other(system, workload, ranks, room, scores=scores)
    )


def search(system: System, shapes: Sequence[Shape], trial: Try, note: str = "") -> Largest:
    """The last shape that fits before one that does not."""
    best, fitting = None, -1
    low, high = 0, len(shapes)
    failed: Trial | None = None
    while low < high:
        middle = (low + high) // 2
        tried = trial(shapes[middle])
        if tried.full:
            high, failed = middle, tried
        else:
            low, best, fitting = middle + 1, tried, middle
    bound = failed.full if failed else ()
    if best is None:
        places = failed.places if failed else {}
        return Largest(system, None, places, bound, note)
    return Largest(system, shapes[fitting], best.places, bound, note)


def _other(system: System, workload: Workload, ranks: Ranks, room: Room, *, scores: bool) -> Try:
    numbers = Numbers()

    def trial(shape: Shape) -> Trial:
        facts = facts_of(shape, workload, itemsize=numbers.parameter, scores=scores)
        held = memory_of(system, subject_from(shape, facts), ranks, numbers)
        places = places_of(held, room, ranks)
        return Trial(places, tuple(too_full(places)))

    return trial


def _ours(workload: Workload, ranks: Ranks, room: Room) -> Try:
    from offload.config import OffloadConfig  # pydantic: a tenth of a second

    config = OffloadConfig.load(
        {
            "precision": "bf16",
            "placement": {"activations": {"checkpoint": True}},
            "optimizer": {"chunk": _CHUNK_NUMEL},
        }
    )
    total = room.nvme_nbytes + room.host_nbytes + ranks.per_node * room.device_nbytes

    def trial(shape: Shape) -> Trial:
        # what no placement can hold is not worth a plan chunk by chunk
        least = shape.numel * _LEAST_BYTES // ranks.nodes
        if least > total:
            return Trial({}, (TierName.NVME,))
        facts = facts_of(shape, workload, itemsize=2, scores=False)
        subject = subject_from(shape, facts)
        ours = plan_ours(config, model_of(shape, ranks.count), subject, ranks, room)
        places = places_of(ours.held, room, ranks)
        full = tuple(too_full(places))
        return Trial(places, full or ours.short_tiers)

    return trial


# The longest that `auto` would choose: fewer pieces to count.
_CHUNK_NUMEL = 1 << 22
# Ours, in bf16 with a split master: 2 + 2 + 8 bytes a parameter, and 2 of a gradient.
_LEAST_BYTES = 14


def _family(name: str) -> FamilyName:
    try:
        return FamilyName(name.strip().lower())
    except ValueError:
        known = ", ".join(FamilyName)
        raise ConfigError(f"family {name!r} is not known; write one of {known}") from None
