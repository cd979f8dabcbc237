"""The step benchmark's case: the largest of a few Llama shapes that a machine can hold and finish.

The planner says what each takes: bf16 with a split master and fp32 moments, all of them in the host
tier as long as they fit. What does not fit of the optimizer's records goes to nvme; what takes
longer than there is time gives way to a smaller shape.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.gpu_machine import GpuMachine
from offload.config import OffloadConfig
from offload.planning.activation_facts import ActivationFacts
from offload.planning.activation_trace import trace_activations
from offload.planning.baseline import known_baseline
from offload.planning.memory import estimate_memory
from offload.planning.plan import Hardware, Plan, needed_nbytes
from offload.planning.plan_sizes import ITEMSIZE
from offload.planning.planner import lay_out_plan
from offload.planning.shortfalls import shortfalls
from offload.planning.step_time import estimate_step
from offload.planning.work_time import update_traffic
from offload.planning.workload import Workload
from offload.tiers.extent import TierName
from offload.tiers.ledger import StateClass
from offload.tiers.units import format_bytes
from offload.train.model import build_meta_model
from offload.zero.discovery import discover
from offload.zero.model_shape import ModelShape

GIB = 1 << 30
SEQUENCE = 1024
BATCHES = (32, 16, 8, 4, 2, 1)
STEPS = 4  # one to warm up, then three that count

_PRECISION = "bf16"
_WINDOW_NBYTES = 1 * GIB  # beside what a tier needs at least
_SPARE_NBYTES = 2 * GIB  # of RAM: what CUDA's libraries take of it is a round figure
_DEVICE_BUDGET_NBYTES = 24 * GIB
_DEVICE_SHARE, _DISK_SHARE = 0.97, 0.9  # of what is free: fragments, others
_LOAD_PASSES = 6  # times that loading and pinning go over a group's fp32 values
_LOAD_BYTES_PER_S = 4e9  # one thread


@dataclass(frozen=True)
class Shape:
    """A Llama: grouped queries, SwiGLU, RMSNorm, embedding and head apart."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int

    def model(self) -> dict[str, Any]:
        """As `train.model` has it."""
        sizes = {name: value for name, value in asdict(self).items() if name != "name"}
        return {"shape": "llama", "max_sequence": SEQUENCE, "tied": False, **sizes}


SHAPES = (
    Shape("8 B", 32, 4096, 32, 8, 14336, 128256),
    Shape("3.6 B", 28, 3072, 24, 8, 8192, 128256),
    Shape("1.5 B", 16, 2048, 32, 8, 8192, 128256),
    Shape("0.5 B", 16, 1280, 20, 5, 3456, 32000),
    Shape("0.15 B", 8, 1024, 16, 16, 4096, 8192),
    Shape("0.01 B", 4, 256, 4, 4, 1024, 8192),
)


@dataclass(frozen=True)
class Peer:
    """What another system takes of the host per parameter."""

    label: str
    host_per_parameter: float


# By its formula 18; 22 were measured on a smaller model.
DEEPSPEED = Peer("DeepSpeed ZeRO-3", 22.0)


@dataclass(frozen=True)
class Case:
    """What is trained, what a step of it has to do, and why it is not larger."""

    shape: Shape
    batch: int
    numel: int
    config: dict[str, Any]  # all but the folder for files
    device_budget_nbytes: int
    record_nbytes_on_nvme: int
    adam_nbytes: int  # of a step, over the memory bus
    flops: float  # of a step, each block's second forward included
    model_flops: float  # without it
    estimated_s: float  # of the whole process
    why: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Per step."""
        return self.batch * SEQUENCE

    @property
    def least_to_device_nbytes(self) -> int:
        """Weights that no step can do without copying: each new one once, and once more in
        backward what the device's budget could not keep."""
        return self.weights_nbytes + max(0, self.weights_nbytes - self.device_budget_nbytes)

    @property
    def weights_nbytes(self) -> int:
        """As many bytes of gradients have to come back."""
        return ITEMSIZE[_PRECISION] * self.numel


def choose(
    machine: GpuMachine, time_s: float, peers: Sequence[Peer] = (), shapes: Iterable[Shape] = SHAPES
) -> tuple[Case | None, tuple[str, ...]]:
    """The first of `shapes` that ours and `peers` can train, with the largest batch that fits and
    ends in `time_s` by estimate; None if there is none. And why each larger one was not taken."""
    refused: list[str] = []
    for shape in shapes:
        found = _case(shape, machine, time_s, peers)
        if isinstance(found, Case):
            return replace(found, why=(*refused, *found.why)), tuple(refused)
        refused.append(f"{shape.name}: {found}")
    return None, tuple(refused)


def _case(
    shape: Shape, machine: GpuMachine, time_s: float, peers: Sequence[Peer]
) -> Case | str:  # fmt: skip
    """The case of one shape, or why it cannot be."""
    numel = _shape_of(shape).numel
    for peer in peers:
        short = peer.host_per_parameter * numel + _SPARE_NBYTES - machine.host_nbytes
        if short > 0:
            return f"{peer.label} needs {format_bytes(int(short))} more RAM than there is"
    planned = _Planned.of(shape, machine)
    if isinstance(planned, str):
        return planned
    for batch in BATCHES:
        if not planned.fits_the_device(batch):
            continue
        case = planned.case(batch)
        if case.estimated_s <= time_s:
            return case
        if batch == BATCHES[-1]:
            return f"would take about {case.estimated_s:.0f} s, there are {time_s:.0f}"
    return f"one sequence of {SEQUENCE} tokens does not fit on the device beside the budget"


@dataclass(frozen=True)
class _Planned:
    """A shape's plan, with as much of the records on nvme as has to be."""

    shape: Shape
    machine: GpuMachine
    spilled: int  # per cent of the records
    config: OffloadConfig
    plan: Plan

    @classmethod
    def of(cls, shape: Shape, machine: GpuMachine) -> _Planned | str:
        """Or why there is none."""
        room = machine.host_nbytes - _SPARE_NBYTES
        spilled = 0
        while True:
            config, plan = _laid_out(shape, machine, spilled)
            planned = cls(shape, machine, spilled, config, plan)
            over = planned.ram_nbytes() - room
            if over <= 0:
                break
            if spilled == 100:
                return (
                    f"ours needs {format_bytes(over)} more RAM than there is, with all optimizer "
                    "records on nvme, too"
                )
            records = sum(held.get(StateClass.OPTIMIZER, 0) for held in plan.expected.values())
            spilled = min(100, spilled + -(-100 * over // records))
        missing = shortfalls(plan, _hardware(machine))
        return missing[0].message.split(";")[0] if missing else planned

    def ram_nbytes(self) -> int:
        return self._peak_nbytes(BATCHES[-1], TierName.HOST)

    def fits_the_device(self, batch: int) -> bool:
        peak = self._peak_nbytes(batch, TierName.DEVICE)
        return peak <= _DEVICE_SHARE * self.machine.device_nbytes

    def _peak_nbytes(self, batch: int, tier: TierName) -> int:
        memory = estimate_memory(
            self.plan, self.config, _shape_of(self.shape), _facts_of(self.shape, batch),
            Workload(batch, SEQUENCE), known_baseline(_PRECISION, gpu=True),
        )  # fmt: skip
        return memory.places[tier].peak_nbytes

    def case(self, batch: int) -> Case:
        plan, numel = self.plan, _shape_of(self.shape).numel
        facts = _facts_of(self.shape, batch)
        itemsize = ITEMSIZE[_PRECISION]
        traffic = update_traffic(plan.record_formats[TierName.HOST], itemsize, itemsize)
        train = {"model": self.shape.model(), "batch": batch, "sequence": SEQUENCE}
        spilled = f"{self.spilled}% of the optimizer's records on nvme: RAM holds no more"
        return Case(
            shape=self.shape, batch=batch, numel=numel,
            config={**_settings(self.shape, plan.budgets, self.spilled), "train": train},
            device_budget_nbytes=plan.budgets[TierName.DEVICE],
            record_nbytes_on_nvme=plan.expected[TierName.NVME].get(StateClass.OPTIMIZER, 0),
            adam_nbytes=int(traffic * numel), flops=facts.forward.flops + facts.backward.flops,
            model_flops=3 * facts.forward.flops, estimated_s=self._estimate_s(batch),
            why=(spilled,) if self.spilled else (),
        )  # fmt: skip

    def _estimate_s(self, batch: int) -> float:
        """From the start of the process to its end, roughly, and rather too long."""
        machine, model = self.machine, _shape_of(self.shape)
        step = estimate_step(
            self.plan, self.config, model, _facts_of(self.shape, batch),
            Workload(batch, SEQUENCE), machine.speeds(),
        )  # fmt: skip
        build = (self.plan.budgets[TierName.HOST]) / machine.touch_bytes_per_s
        build += 4 * model.numel * _LOAD_PASSES / _LOAD_BYTES_PER_S
        build += self.plan.total(TierName.NVME) / machine.disk_write_bytes_per_s
        started = 10.0  # imports, CUDA, kernels compiled
        return started + build + STEPS * step.seconds


def _hardware(machine: GpuMachine) -> Hardware:
    disk = int(_DISK_SHARE * machine.disk_nbytes)
    return Hardware(machine.device_nbytes, machine.host_nbytes, machine.host_nbytes, disk)


def _laid_out(shape: Shape, machine: GpuMachine, spilled: int) -> tuple[OffloadConfig, Plan]:
    """With budgets that hold what it needs, and a window."""
    budgets = {
        TierName.DEVICE: min(_DEVICE_BUDGET_NBYTES, machine.device_nbytes // 2),
        TierName.HOST: machine.host_nbytes, TierName.NVME: machine.disk_nbytes,
    }  # fmt: skip
    config = OffloadConfig.load(_settings(shape, budgets, spilled))
    plan = lay_out_plan(config, _shape_of(shape), _hardware(machine))
    for tier in (TierName.HOST, TierName.NVME):
        needed = needed_nbytes(plan, tier)
        budgets[tier] = needed + _WINDOW_NBYTES if needed else 0
    config = OffloadConfig.load(_settings(shape, budgets, spilled))
    return config, lay_out_plan(config, _shape_of(shape), _hardware(machine))


def _settings(shape: Shape, budgets: Any, spilled: int) -> dict[str, Any]:
    records = {"host": f"{100 - spilled}%", "nvme": f"{spilled}%"} if spilled else "host"
    return {
        "device": "cuda",
        "precision": _PRECISION,
        "budget": {str(tier): nbytes for tier, nbytes in budgets.items()},
        "placement": {
            "parameters": "host", "gradients": "host", "optimizer": records,
            "activations": {"tier": "device", "checkpoint": True},
        },
        "optimizer": {"type": "adamw", "lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "clip_grad_norm": 1.0,
        "train": {"model": shape.model()},
    }  # fmt: skip


# ---------------------------------------------------------------- what a shape is, by itself
@functools.cache
def _shape_of(shape: Shape) -> ModelShape:
    return discover(build_meta_model(_config_of(shape)), ()).shape()


@functools.cache
def _facts_of(shape: Shape, batch: int) -> ActivationFacts:
    config = _config_of(shape)
    workload = Workload(batch, SEQUENCE)
    return trace_activations(build_meta_model(config), config, workload, device="cuda")


def _config_of(shape: Shape) -> OffloadConfig:
    return OffloadConfig.load(_settings(shape, {}, 0))
