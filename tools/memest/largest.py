"""The largest model of a family that given hardware trains, under each system: `memest max`.

Found by bisection over the family's ladder of shapes; no search, no chance, well under a second.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from offload.planning.plan.estimate import PlaceEstimate
from offload.planning.plan.workload import Workload
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
from offload.tools.memest.systems_ours import plan_ours

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
    shapes = ladder(name, experts)
    if system is not System.OURS:
        return search(system, shapes, _other(system, workload, ranks, room, scores=False))
    holding = _room_nbytes(ranks, room) // _OUR_BYTES
    guess = bisect.bisect(shapes, holding, key=lambda shape: shape.numel)
    note = f"{system}: one of {ranks.count} ranks, ZeRO stage 3" if ranks.count > 1 else ""
    return search(system, shapes, _ours(workload, ranks, room), note, guess)


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


def search(
    system: System, shapes: Sequence[Shape], trial: Try, note: str = "", first: int | None = None
) -> Largest:
    """The last shape that fits before one that does not. `first`: where to begin, if there is a
    guess: then growing steps until the answer lies between two of them."""
    best, fitting, failed = None, -1, None
    low, high = 0, len(shapes)
    probe = len(shapes) // 2 if first is None else min(first, len(shapes) - 1)
    stride = 0 if first is None else 4
    while low < high:
        tried = trial(shapes[probe])
        if tried.full:
            high, failed = probe, tried
        else:
            low, best, fitting = probe + 1, tried, probe
        probe, stride = _next(low, high, probe, stride, len(shapes))
    bound = failed.full if failed else ()
    if best is None:
        return Largest(system, None, failed.places if failed else {}, bound, note)
    return Largest(system, shapes[fitting], best.places, bound, note)


def _next(low: int, high: int, probe: int, stride: int, count: int) -> tuple[int, int]:
    """Where to look next between `low` and `high`, and how far to go the time after."""
    if stride and high == count and low + stride < high:
        return low + stride, stride * 4
    if stride and low == 0 and high - stride > low:
        return high - stride, stride * 4
    return (low + high) // 2, 0


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

    plain = {"precision": "bf16", "placement": {"activations": {"checkpoint": True}}}

    def trial(shape: Shape) -> Trial:
        chunk = _LONG_CHUNK if shape.numel > _LONG_CHUNK_FROM * ranks.count else _CHUNK
        config = OffloadConfig.load({**plain, "optimizer": {"chunk": chunk}})
        facts = facts_of(shape, workload, itemsize=2, scores=False)
        subject = subject_from(shape, facts)
        ours = plan_ours(config, model_of(shape), subject, ranks, room)
        places = places_of(ours.held, room, ranks)
        full = tuple(too_full(places))
        return Trial(places, full or ours.short_tiers)

    return trial


def _room_nbytes(ranks: Ranks, room: Room) -> int:
    """Of all nodes together."""
    node = room.nvme_nbytes + room.host_nbytes + ranks.per_node * room.device_nbytes
    return node * ranks.nodes


# Ours, in bf16 with Adam and a split master: weight 2, remainder 2, moments 8, gradient 2.
_OUR_BYTES = 14
# Elements. The longest that `auto` would choose; longer still where there would be tens of
# thousands of pieces to count.
_CHUNK, _LONG_CHUNK, _LONG_CHUNK_FROM = 1 << 22, 1 << 24, 20 * 10**9


def _family(name: str) -> FamilyName:
    try:
        return FamilyName(name.strip().lower())
    except ValueError:
        known = ", ".join(FamilyName)
        raise ConfigError(f"family {name!r} is not known; write one of {known}") from None
