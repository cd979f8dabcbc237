"""Made-up estimates for the tests of what is shown."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from offload.config import OffloadConfig
from offload.planning.choice.planner import make_plan
from offload.planning.plan.estimate import (
    LinkTime,
    MemoryClass,
    MemoryEstimate,
    PlaceEstimate,
    Shortfall,
    StepEstimate,
    Workload,
)
from offload.planning.plan.plan import Hardware, Plan
from offload.tiers.tier import Tier
from offload.tools.memest.estimate.result import Change, Estimate
from offload.zero.groups.layout import ParamShape
from offload.zero.groups.model_shape import GroupShape, ModelShape, UnitShape

GiB = 1 << 30
MiB = 1 << 20
C = MemoryClass


def model(layers: int = 4, width: int = 256) -> ModelShape:
    names = ["embedding", *(f"layers.{i}" for i in range(layers)), "head"]
    groups = tuple(GroupShape(n, (ParamShape((f"{n}.weight",), (width, width)),)) for n in names)
    units = tuple(UnitShape(n, (i,), n.startswith("layers")) for i, n in enumerate(names))
    return ModelShape(groups, units)


def plan(config: Mapping[str, Any] | None = None, device: int = 0) -> Plan:
    hardware = Hardware(device, 64 * GiB, 48 * GiB, 500 * GiB)
    return make_plan(OffloadConfig.load(config or {}), model(), hardware)


def memory(gpu: bool = False, scale: float = 1.0) -> MemoryEstimate:
    def sized(**by_class: float) -> dict[MemoryClass, int]:
        return {MemoryClass(name): int(n * GiB * scale) for name, n in by_class.items()}

    places = {
        Tier.HOST: PlaceEstimate(
            64 * GiB,
            sized(parameters=12.5, gradients=6, optimizer=18, activations=0.4, staging=1.2,
                  fragmentation=0.03, framework=0.8),
        ),
        Tier.NVME: PlaceEstimate(
            500 * GiB, sized(optimizer=210, staging=0.5, fragmentation=0.02)
        ),
    }  # fmt: skip
    if gpu:
        places[Tier.DEVICE] = PlaceEstimate(
            24 * GiB, sized(activations=9.3, staging=4.1, fragmentation=0.05, framework=0.7)
        )
    peaks = {tier: place.peak_nbytes for tier, place in places.items()}
    return MemoryEstimate(places, peaks)


def step(scale: float = 1.0) -> StepEstimate:
    read, write = int(200 * GiB * scale), int(190 * GiB * scale)
    return StepEstimate(
        92.0 * scale,
        (
            LinkTime("compute", 61.0 * scale),
            LinkTime("optimizer", 18.5 * scale, int(300 * GiB * scale)),
            LinkTime("nvme read", 84.0 * scale, read),
            LinkTime("nvme write", 44.0 * scale, write),
        ),
        "nvme read",
        8 * 2048,
    )


def estimate(gpu: bool = False, fits: bool = True, scale: float = 1.0, **changed: Any) -> Estimate:
    """One that fits, or not; `scale`: of every byte and second."""
    made = Estimate(
        model="Llama-made-up-30B",
        numel=int(30.2e9 * scale),
        numel_trainable=int(30.2e9 * scale),
        hardware="this machine" if not gpu else "RTX 4090, 64.0 GiB of RAM, Gen4 SSD",
        workload=Workload(8, 2048, 1),
        config=OffloadConfig.load({"precision": "bf16"}),
        plan=plan({"precision": "bf16"}),
        memory=memory(gpu, scale),
        checkpoint_nbytes=int(84 * GiB * scale),
        step=step(scale),
        notes=("activations of one block, traced without values, times 60",
               "speed of the SSD is that of its data sheet"),
        endurance_nbytes=600 * 10**12,
    )  # fmt: skip
    if not fits:
        made = replace(
            made,
            shortfalls=(
                Shortfall(
                    Tier.HOST, 96 * GiB, 64 * GiB, "budget.host",
                    "budget.host: 64.0 GiB is 32.0 GiB short of the 96.0 GiB needed; set "
                    "placement.optimizer: nvme",
                ),
            ),
            changes=(
                Change({"placement.optimizer": "nvme"}, "all optimizer states on disk", 1.42),
                Change({"--ram": "96GiB"}, "more RAM", 1.0),
                Change({"optimizer.states": "int8", "precision": "bf16"},
                       "states in 1 byte (an approximation), parameters in 16 bits", 0.84),
            ),
        )  # fmt: skip
    return replace(made, **changed)
