"""Finds the largest model of a family that given hardware trains, under each system: `memest max`.

Found by bisection over the family's list of shapes; no search, no chance, well under a second.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from offload.planning.activations.facts import ActivationFacts
from offload.planning.machine.speeds import Speeds
from offload.planning.plan.estimate import PlaceEstimate
from offload.planning.plan.sizes import ITEMSIZE
from offload.planning.plan.workload import Generation, Workload
from offload.planning.step.step_time import estimate_step
from offload.tiers.errors import ConfigError
from offload.tiers.tier import Tier
from offload.tools.memest.hardware.profiles import HardwareProfile
from offload.tools.memest.systems.memory import OTHERS, Framework, Numbers, System, memory_of
from offload.tools.memest.systems.ours import OurPlan, plan_ours
from offload.tools.memest.systems.shapes import (
    FamilyName,
    Shape,
    facts_of,
    generation_of,
    model_of,
    shapes_of,
    subject_from,
)
from offload.tools.memest.systems.step_time import rough_step_s
from offload.tools.memest.systems.subject import Ranks, Room, places_of, ranks_of, room_of, too_full
from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig

WORKLOAD = Workload(batch=1, sequence=2048)
_PRECISION = "bf16"
_LEAST_EXPERTS = 8


@dataclass(frozen=True)
class Trial:
    """A system with one model on some hardware."""

    places: Mapping[Tier, PlaceEstimate]
    full: tuple[Tier, ...]  # places that cannot hold their part


@dataclass(frozen=True)
class Largest:
    """The answer for one system."""

    system: System
    shape: Shape | None  # None: not even the smallest of the family fits
    places: Mapping[Tier, PlaceEstimate]  # with that model; without one, with the smallest
    bound: tuple[Tier, ...]  # the places that the next larger model does not fit into
    note: str = ""
    label: str = ""  # instead of the system's name
    step_s: float | None = None  # seconds of one step or pass; None: not known
    tokens: int = 0  # of a step, of all ranks

    @property
    def name(self) -> str:
        return self.label or str(self.system)

    @property
    def numel(self) -> int:
        return self.shape.numel if self.shape else 0

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.step_s if self.step_s else None


Trying = Callable[[Shape], Trial]


def largest(
    family: str, profile: HardwareProfile, system: System, workload: Workload = WORKLOAD,
    speeds: Speeds | None = None,
) -> Largest:  # fmt: skip
    """Find the largest shape, in bf16 with Adam, every block recomputed, fused attention; a step is
    timed if `speeds`, one rank's, are known. Raise ConfigError for an unknown family."""
    ranks, room = ranks_of(profile), room_of(profile)
    name = _family(family)
    experts = max(_LEAST_EXPERTS, ranks.count) if name is FamilyName.MOE else 0
    if experts:
        ranks = Ranks(ranks.per_node, ranks.nodes, experts=math.gcd(experts, ranks.count))
    found = _fitting(system, name, ranks, room, workload, experts)
    if found.shape is None or speeds is None:
        return found
    step_s = _step_s(system, found.shape, ranks, room, workload, speeds)
    return replace(found, step_s=step_s, tokens=workload.tokens * ranks.count)


def _fitting(
    system: System, name: FamilyName, ranks: Ranks, room: Room, workload: Workload, experts: int
) -> Largest:
    if system is not System.OURS:
        return largest_shape(system, name, ranks, room, workload, experts=experts, scores=False)
    shapes = shapes_of(name, experts)
    beyond = bisect.bisect(shapes, _room_nbytes(ranks, room) // _LEAST_BYTES, key=_numel)
    note = f"{system}: one of {ranks.count} ranks, ZeRO stage 3" if ranks.count > 1 else ""
    return _search(system, shapes[: beyond + 1], _ours(workload, ranks, room), note)


def largest_of_all(
    family: str, profile: HardwareProfile, workload: Workload = WORKLOAD,
    speeds: Speeds | None = None,
) -> list[Largest]:  # fmt: skip
    """Find the largest shape under every system, offload last."""
    return [largest(family, profile, each, workload, speeds) for each in (*OTHERS, System.OURS)]


def largest_generating(
    family: str, profile: HardwareProfile, generation: Generation, speeds: Speeds | None = None
) -> list[Largest]:
    """Find the largest shape that generates with offload, with weights as they are and in fewer
    bits; the seconds are of a decoding pass."""
    ranks, room = ranks_of(profile), room_of(profile)
    if ranks.count > 1:
        raise ConfigError("max --inference: is of one process; leave --gpus and --nodes out")
    name = _family(family)
    experts = _LEAST_EXPERTS if name is FamilyName.MOE else 0
    shapes = shapes_of(name, experts)
    found = []
    for stored in (None, "int8", "int4"):
        trial = partial(_generating, generation=generation, stored=stored, ranks=ranks, room=room)
        best = _largest_of(
            shapes,
            trial,
            f"offload, {stored or _PRECISION}",
            _room_nbytes(ranks, room) / _LEAST_STORED[stored],
        )
        if best.shape is not None and speeds is not None:
            ours = trial(best.shape)[1]
            facts = generation_of(best.shape, generation, itemsize=ITEMSIZE[_PRECISION]).peak
            model = _frozen_model(best.shape, ours.config)
            step = estimate_step(ours.plan, ours.config, model, facts, generation.usual, speeds)
            best = replace(best, step_s=step.seconds, tokens=step.tokens)
        found.append(best)
    return found


def _largest_of(
    shapes: Sequence[Shape], trial: Callable[[Shape], tuple[Trial, OurPlan]], label: str,
    most_numel: float,
) -> Largest:  # fmt: skip
    """Return the largest shape that fits, tried from the largest down: a cache may take more in a
    smaller model of more layers, so that fitting is not monotonic in size."""
    beyond: tuple[Tier, ...] = ()
    for shape in reversed(shapes[: bisect.bisect(shapes, most_numel, key=_numel)]):
        tried = trial(shape)[0]
        if not tried.full:
            return Largest(System.OURS, shape, tried.places, beyond, label=label)
        beyond = tried.full
    return Largest(System.OURS, None, trial(shapes[0])[0].places, beyond, label=label)


def _generating(
    shape: Shape, *, generation: Generation, stored: str | None, ranks: Ranks, room: Room
) -> tuple[Trial, OurPlan]:
    from offload.config import OffloadConfig

    keys = {} if stored is None else {"storage": {"weights": stored, "skip": ["head"]}}
    if shape.family is not FamilyName.LLAMA and stored is not None:
        keys = {"storage": {"weights": stored, "skip": []}}
    config = OffloadConfig.load({"precision": _PRECISION, **keys}).for_inference()
    facts = generation_of(shape, generation, itemsize=ITEMSIZE[_PRECISION])
    model = _frozen_model(shape, config)
    subject = replace(
        subject_from(shape, facts.peak), numel_trainable=0, working_nbytes=facts.peak.peak_nbytes
    )
    ours = plan_ours(config, model, subject, ranks, room, SERVING)
    places = places_of(ours.held, room, ranks.per_node)
    return Trial(places, tuple(too_full(places)) or ours.short_tiers), ours


def _frozen_model(shape: Shape, config: OffloadConfig) -> ModelShape:
    model = _our_model(shape, config, Ranks()).frozen
    return model.stored(config.stored)


def largest_shape(
    system: System, family: FamilyName, ranks: Ranks, room: Room, workload: Workload, *,
    experts: int, scores: bool,
) -> Largest:  # fmt: skip
    """Find the largest shape as `largest` does, for any way of spreading a model over GPUs, with or
    without attention scores. Not for `System.OURS`."""
    trial = _other(system, workload, ranks, room, scores=scores)
    return _search(system, shapes_of(family, experts), trial)


def _search(system: System, shapes: Sequence[Shape], trial: Trying, note: str = "") -> Largest:
    """Return the last shape that fits before one that does not, by bisection."""
    tried: dict[Shape, Trial] = {}

    def fails(shape: Shape) -> bool:
        tried[shape] = trial(shape)
        return bool(tried[shape].full)

    count = bisect.bisect_left(shapes, True, key=fails)
    bound = tried[shapes[count]].full if count < len(shapes) else ()
    if not count:
        return Largest(system, None, tried[shapes[0]].places, bound, note)
    return Largest(system, shapes[count - 1], tried[shapes[count - 1]].places, bound, note)


def _numel(shape: Shape) -> int:
    return shape.numel


def _other(system: System, workload: Workload, ranks: Ranks, room: Room, *, scores: bool) -> Trying:
    numbers = Numbers()

    def trial(shape: Shape) -> Trial:
        facts = facts_of(shape, workload, itemsize=numbers.parameter, scores=scores)
        held = memory_of(system, subject_from(shape, facts), ranks, numbers)
        places = places_of(held, room, ranks.per_node)
        return Trial(places, tuple(too_full(places)))

    return trial


def _ours(workload: Workload, ranks: Ranks, room: Room) -> Trying:
    def trial(shape: Shape) -> Trial:
        ours = _our_plan(shape, workload, ranks, room)
        places = places_of(ours.held, room, ranks.per_node)
        full = tuple(too_full(places))
        return Trial(places, full or ours.short_tiers)

    return trial


def _our_plan(shape: Shape, workload: Workload, ranks: Ranks, room: Room) -> OurPlan:
    from offload.config import OffloadConfig  # pydantic: a tenth of a second

    chunk = _LONG_CHUNK if shape.numel > _LONG_CHUNK_FROM * ranks.count else _CHUNK
    keys = {"placement": {"activations": {"checkpoint": True}}, "optimizer": {"chunk": chunk}}
    config = OffloadConfig.load({"precision": _PRECISION, **keys})
    subject = subject_from(shape, _facts(shape, workload))
    return plan_ours(config, _our_model(shape, config, ranks), subject, ranks, room)


def _our_model(shape: Shape, config: OffloadConfig, ranks: Ranks) -> ModelShape:
    model = model_of(shape)
    return model if config.splits_experts(ranks.count) else model.joined


def _facts(shape: Shape, workload: Workload) -> ActivationFacts:
    return facts_of(shape, workload, itemsize=ITEMSIZE[_PRECISION], scores=False)


def _step_s(
    system: System, shape: Shape, ranks: Ranks, room: Room, workload: Workload, speeds: Speeds
) -> float | None:
    """Return the seconds of a step: for offload as the planner predicts it; for other systems
    roughly, and on one GPU alone."""
    facts = _facts(shape, workload)
    if system is System.OURS:
        ours = _our_plan(shape, workload, ranks, room)
        network = speeds.network
        if ranks.count > 1 and (network is None or not network.knows(ours.plan.sharding)):
            return None
        model = _our_model(shape, ours.config, ranks)
        return estimate_step(ours.plan, ours.config, model, facts, workload, speeds).seconds
    if ranks.count > 1:
        return None
    subject = subject_from(shape, facts)
    return rough_step_s(system, subject, facts, workload, _PRECISION, Numbers(), speeds)


def _room_nbytes(ranks: Ranks, room: Room) -> int:
    """Return the bytes of all nodes together."""
    node = room.nvme_nbytes + room.host_nbytes + ranks.per_node * room.device_nbytes
    return node * ranks.nodes


# A parameter in offload takes more: in bf16 weight 2, master's remainder 2, moments of Adam 8.
_LEAST_BYTES = 8
SERVING = Framework(host_nbytes=1 << 30)  # Python, PyTorch, transformers: half of it, measured
_LEAST_STORED = {None: 2.0, "int8": 1.0, "int4": 0.5}  # of one that is not trained
# Elements. The longest that `auto` would choose; longer still where there would be tens of
# thousands of pieces to count.
_CHUNK, _LONG_CHUNK, _LONG_CHUNK_FROM = 1 << 22, 1 << 24, 20 * 10**9


def _family(name: str) -> FamilyName:
    try:
        return FamilyName(name.strip().lower())
    except ValueError:
        known = ", ".join(FamilyName)
        raise ConfigError(f"family {name!r} is not known; write one of {known}") from None
