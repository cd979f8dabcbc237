"""One model under every system, side by side: `memest compare`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.planning.activations.facts import ActivationFacts
from offload.planning.choice.durations import duration
from offload.planning.machine.speeds import Speeds
from offload.planning.plan.estimate import Estimate, MemoryClass, PlaceEstimate
from offload.planning.plan.sizes import ITEMSIZE
from offload.planning.plan.workload import Workload
from offload.tiers.extent import TierName
from offload.tiers.units import format_bytes
from offload.tools.memest.profiles import HardwareProfile
from offload.tools.memest.room import Room, places_of, room_of, too_full
from offload.tools.memest.subject import Ranks, Subject, ranks_of, subject_of
from offload.tools.memest.systems import (
    FRAMEWORK,
    OTHERS,
    Framework,
    Numbers,
    System,
    memory_of,
)
from offload.tools.memest.systems_ours import plan_ours
from offload.tools.memest.systems_time import rough_step_s
from offload.zero.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig

PLACE_NAMES = {
    TierName.DEVICE: "GPU memory", TierName.HOST: "RAM of a node", TierName.NVME: "nvme of a node"
}  # fmt: skip
ROUGH = "steps of other systems: roughly, all that they can overlap overlapped"


@dataclass(frozen=True)
class Row:
    """One system. `places`: of one GPU, of one node's RAM, of one node's disks."""

    system: System
    places: Mapping[TierName, PlaceEstimate]
    full: tuple[TierName, ...]  # places that cannot hold their part
    step_s: float | None  # None: not known
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.full

    @property
    def short(self) -> str:
        """`GPU memory 3.2 GiB short`; empty where it fits."""
        texts = []
        for tier in self.full:
            place = self.places[tier]
            missing = place.peak_nbytes - place.capacity_nbytes
            texts.append(f"{PLACE_NAMES[tier]} {format_bytes(max(0, missing))} short")
        return ", ".join(texts)


def compare(
    model: ModelShape, facts: ActivationFacts, config: OffloadConfig, workload: Workload,
    profile: HardwareProfile, speeds: Speeds | None = None, ours: Estimate | None = None,
) -> list[Row]:  # fmt: skip
    """All systems with the same model, batch, precision and recomputation; ours last.

    `ours`: what `memest` said of the model, one rank's; without it the planner is asked here, with
    budgets up to the brim, and there is no time of ours. What libraries take is then as in `ours`
    for every system.
    """
    subject = subject_of(
        model, facts, recomputed=config.placement.activations.checkpoint is True
    )  # fmt: skip
    ranks, room = ranks_of(profile), room_of(profile)
    numbers = Numbers(ITEMSIZE[config.precision], 4 * len(config.optimizer.state_names))
    framework = _framework(ours)
    rows = []
    for system in OTHERS:
        places = places_of(memory_of(system, subject, ranks, numbers, framework), room, ranks)
        step_s = None
        if speeds is not None and ranks.count == 1:
            step_s = rough_step_s(
                system, subject, facts, workload, config.precision, numbers, speeds
            )
        notes = (ROUGH,) if step_s is not None else ()
        rows.append(Row(system, places, tuple(too_full(places)), step_s, notes))
    if ours is None:
        return [*rows, _planned(model, config, subject, ranks, room)]
    return [*rows, _given(ours, ranks, room)]


def _framework(ours: Estimate | None) -> Framework:
    if ours is None:
        return FRAMEWORK
    taken = {
        tier: place.by_class.get(MemoryClass.FRAMEWORK, 0)
        for tier, place in ours.memory.places.items()
    }
    return Framework(taken.get(TierName.DEVICE, 0), taken.get(TierName.HOST, 0))


def _planned(
    model: ModelShape, config: OffloadConfig, subject: Subject, ranks: Ranks, room: Room
) -> Row:
    found = plan_ours(config, model, subject, ranks, room)
    places = places_of(found.held, room, ranks)
    full = tuple(too_full(places)) or found.short_tiers
    return Row(System.OURS, places, full, None)


def _given(ours: Estimate, ranks: Ranks, room: Room) -> Row:
    """Of one rank's estimate: RAM and disks of the node's ranks together."""
    places = {}
    for tier, place in ours.memory.places.items():
        times = 1 if tier is TierName.DEVICE else ranks.per_node
        by_class = {each: nbytes * times for each, nbytes in place.by_class.items()}
        places[tier] = PlaceEstimate(room.capacity(tier), by_class)
    full = tuple(dict.fromkeys(shortfall.tier for shortfall in ours.shortfalls))
    step_s = ours.step.seconds if ours.step is not None and ranks.count == 1 else None
    return Row(System.OURS, places, full, step_s)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """A plain table: used of what is there, by place; the step; the verdict."""
    tiers = [tier for tier in TierName if tier in rows[0].places]
    heads = "".join(f"{PLACE_NAMES[tier]:>24}" for tier in tiers)
    yield f"{'system':<20}{heads}{'step':>12}  fits"
    for row in rows:
        cells = "".join(f"{_used(row.places.get(tier)):>24}" for tier in tiers)
        step = duration(row.step_s) if row.step_s is not None else "-"
        yield f"{row.system:<20}{cells}{step:>12}  {'yes' if row.fits else row.short}"
    for note in dict.fromkeys(note for row in rows for note in row.notes):
        yield f"({note})"


def _used(place: PlaceEstimate | None) -> str:
    if place is None:
        return "-"
    return f"{format_bytes(place.peak_nbytes)} of {format_bytes(place.capacity_nbytes)}"
