"""One model under every system, side by side: `memest compare`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from offload.planning.activations.facts import ActivationFacts
from offload.planning.machine.speeds import Speeds
from offload.planning.plan.estimate import Estimate, MemoryClass, PlaceEstimate
from offload.planning.plan.sizes import ITEMSIZE
from offload.tiers.tier import Tier
from offload.tools.memest.hardware.profiles import HardwareProfile
from offload.tools.memest.systems.memory import (
    OTHERS,
    Framework,
    Numbers,
    System,
    memory_of,
)
from offload.tools.memest.systems.step_time import rough_step_s
from offload.tools.memest.systems.subject import (
    Ranks,
    Room,
    places_of,
    ranks_of,
    room_of,
    subject_of,
    too_full,
)
from offload.zero.groups.model_shape import ModelShape

ROUGH = "steps of other systems: roughly, all that they can overlap overlapped"


@dataclass(frozen=True)
class Row:
    """One system. `places`: the bytes of one GPU, of one node's RAM, of one node's disks."""

    system: System
    places: Mapping[Tier, PlaceEstimate]
    full: tuple[Tier, ...]  # places that cannot hold their part
    step_s: float | None  # None: not known
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.full


def compare(
    model: ModelShape, facts: ActivationFacts, ours: Estimate, profile: HardwareProfile,
    speeds: Speeds | None = None,
) -> list[Row]:  # fmt: skip
    """Compare all systems with the model, batch, precision and recomputation of `ours`, which comes
    last.

    `ours`: the estimate of `memest` for one rank; its bytes for libraries are used for every
    system. `model`: one rank's part, with experts spread over as many ranks as those of `ours`.
    """
    config, workload = ours.config, ours.workload
    recomputed = config.placement.activations.checkpoint is True
    subject = subject_of(model, facts, recomputed=recomputed)
    ranks, room = ranks_of(profile), room_of(profile)
    if ours.experts is not None:
        ranks = replace(ranks, experts=ours.experts.ep_size)
    numbers = Numbers(ITEMSIZE[config.precision], 4 * len(config.optimizer.state_names))
    framework = _framework(ours)
    rows = []
    for system in OTHERS:
        places = places_of(
            memory_of(system, subject, ranks, numbers, framework), room, ranks.per_node
        )
        step_s = None
        if speeds is not None and ranks.count == 1:
            step_s = rough_step_s(
                system, subject, facts, workload, config.precision, numbers, speeds
            )
        notes = (ROUGH,) if step_s is not None else ()
        rows.append(Row(system, places, tuple(too_full(places)), step_s, notes))
    return [*rows, _our_row(ours, ranks, room)]


def _framework(ours: Estimate) -> Framework:
    taken = {
        tier: place.by_class.get(MemoryClass.FRAMEWORK, 0)
        for tier, place in ours.memory.places.items()
    }
    return Framework(taken.get(Tier.DEVICE, 0), taken.get(Tier.HOST, 0))


def _our_row(ours: Estimate, ranks: Ranks, room: Room) -> Row:
    """Return offload's row: RAM and disks of all ranks of a node together."""
    places = {}
    for tier, place in ours.memory.places.items():
        times = 1 if tier is Tier.DEVICE else ranks.per_node
        by_class = {each: nbytes * times for each, nbytes in place.by_class.items()}
        places[tier] = PlaceEstimate(room.capacity(tier), by_class)
    full = tuple(dict.fromkeys(shortfall.tier for shortfall in ours.shortfalls))
    step_s = ours.step.seconds if ours.step is not None and ranks.count == 1 else None
    return Row(System.OURS, places, full, step_s)
