"""The step benchmark's case: the largest of a few Llama shapes that a machine can hold and finish.

The planner says what each takes: bf16 with a split master and fp32 moments, all of them in the host
tier as long as they fit. What does not fit of the optimizer's records goes to nvme; what takes
longer than there is time gives way to a smaller shape.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.gpu_machine import GpuMachine
from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.planning.activations.facts import ActivationFacts
from offload.planning.activations.trace import trace_activations
from offload.planning.choice.solver import Candidate, RunFacts, solve
from offload.planning.machine.baseline import known_baseline
from offload.planning.plan.plan import Hardware, needed_nbytes
from offload.planning.plan.workload import Workload
from offload.planning.step.work_time import update_traffic
from offload.process.machine import cpu_count
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.zero.groups.discovery import discover
from offload.zero.groups.model_shape import ModelShape

GIB = 1 << 30
SEQUENCE = 1024
BATCHES = (32, 16, 8, 4, 2, 1)
STEPS = 4  # one to warm up, then three that count

_PRECISION, _ITEMSIZE = "bf16", 2
_WINDOW_NBYTES = 1 * GIB  # beside what a tier needs at least
_SPARE_NBYTES = 2 * GIB  # of RAM: what CUDA's libraries take of it is a round figure
_DEVICE_BUDGET_NBYTES = 24 * GIB
_DISK_SHARE = 0.9  # of what is free
_STARTED_S = 10.0  # imports, CUDA, kernels compiled
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
        """The shape as `train.model` has it."""
        sizes = {name: value for name, value in asdict(self).items() if name != "name"}
        return {"max_sequence": SEQUENCE, "tied": False, **sizes}


LARGE = Shape("30 B", 50, 7168, 56, 8, 20480, 128256)  # never chosen by itself
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
    """The host memory per parameter that another system needs."""

    label: str
    host_per_parameter: float


# By its formula 18; 22 were measured on a smaller model.
DEEPSPEED = Peer("DeepSpeed ZeRO-3", 22.0)


@dataclass(frozen=True)
class Case:
    """The model and configuration to train, the work of a step, and why it is not larger."""

    shape: Shape
    batch: int
    numel: int
    config: dict[str, Any]  # all but the folder for files
    device_budget_nbytes: int
    record_nbytes_on_nvme: int
    adam_nbytes: int  # of a step, over the memory bus
    flops: float  # of a step, each block's second forward included
    model_flops: float  # without it
    predicted_s: float  # of a step, by the planner; 0 where it was not asked
    estimated_s: float  # of the whole process
    why: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """The number of tokens per step."""
        return self.batch * SEQUENCE

    @property
    def least_to_device_nbytes(self) -> int:
        """The bytes of weights that every step has to copy: each new weight once, and once more in
        backward those that the device's budget could not keep."""
        return self.weights_nbytes + max(0, self.weights_nbytes - self.device_budget_nbytes)

    @property
    def weights_nbytes(self) -> int:
        """The number of bytes of the weights; as many bytes of gradients have to come back."""
        return _ITEMSIZE * self.numel


def choose(
    machine: GpuMachine,
    time_s: float,
    peers: Sequence[Peer] = (),
    shapes: Iterable[Shape] = SHAPES,
    spilled: int = 0,
) -> tuple[Case | None, tuple[str, ...]]:
    """The first of `shapes` that ours and `peers` can train, with the largest batch that fits and
    ends in `time_s` by estimate; None if there is none. And why each larger shape was not taken. At
    least `spilled` per cent of the optimizer's records are on nvme, also if RAM could hold them."""
    refused: list[str] = []
    for shape in shapes:
        found = _case(shape, machine, time_s, peers, spilled)
        if isinstance(found, Case):
            return replace(found, why=(*refused, *found.why)), tuple(refused)
        refused.append(f"{shape.name}: {found}")
    return None, tuple(refused)


def _case(
    shape: Shape, machine: GpuMachine, time_s: float, peers: Sequence[Peer], least_spilled: int
) -> Case | str:
    """The case of one shape, or why it cannot be."""
    numel, reason = _shape_of(shape).numel, ""
    for peer in peers:
        short = peer.host_per_parameter * numel + _SPARE_NBYTES - machine.host_nbytes
        if short > 0:
            return f"{peer.label} needs {format_bytes(int(short))} more RAM than there is"
    for batch in BATCHES:
        best, spilled = _planned(shape, batch, machine, least_spilled)
        if not best.fits:
            reason = best.shortfalls[0].message.split(";")[0]
            if best.shortfalls[0].tier is not Tier.DEVICE:
                return reason  # whatever the batch
            continue
        if best.plan.room_nbytes(Tier.DEVICE) < _device_budget(machine):
            reason = f"one sequence of {SEQUENCE} tokens leaves too little of the device"
            continue
        case = _laid_out(shape, batch, best, spilled, machine)
        if spilled > least_spilled:
            why = f"{spilled}% of the optimizer's records on nvme: RAM holds no more"
            case = replace(case, why=(why,))
        if case.estimated_s <= time_s:
            return case
        reason = f"would take about {case.estimated_s:.0f} s, there are {time_s:.0f}"
    return reason


def _device_budget(machine: GpuMachine) -> int:
    return min(_DEVICE_BUDGET_NBYTES, machine.device_nbytes // 2)


def _planned(shape: Shape, batch: int, machine: GpuMachine, spilled: int) -> tuple[Candidate, int]:
    """The best candidate, with as much of the optimizer's records on nvme as needed, at least
    `spilled` per cent; and that percentage."""
    while True:
        best = _solved(shape, batch, machine, {}, spilled)
        short = [s for s in best.shortfalls if s.tier is Tier.HOST]
        if not short or spilled == 100:
            return best, spilled
        over = max(each.needed_nbytes - each.capacity_nbytes for each in short)
        records = sum(held.get(StateClass.OPTIMIZER, 0) for held in best.plan.expected.values())
        spilled = min(100, spilled - (-100 * over // records))


def _solved(
    shape: Shape, batch: int, machine: GpuMachine, budgets: Mapping[Tier, int], spilled: int
) -> Candidate:
    """The planner's best candidate; without `budgets`, with all memory that the machine has."""
    model, facts = _shape_of(shape), _facts_of(shape, batch)
    base = known_baseline(_PRECISION, gpu=True)
    known = RunFacts(Workload(batch, SEQUENCE), machine.speeds, lambda _: facts, base)
    ram, disk = machine.host_nbytes - _SPARE_NBYTES, int(_DISK_SHARE * machine.disk_nbytes)
    hardware = Hardware(machine.device_nbytes, ram, ram, disk, cores=cpu_count())
    config = OffloadConfig.load(_settings(shape, budgets, spilled))
    return solve(config, model, hardware, known).best


def _laid_out(shape: Shape, batch: int, best: Candidate, spilled: int, machine: GpuMachine) -> Case:
    """The case with budgets that hold what is needed, and a window."""
    plan, numel, facts = best.plan, _shape_of(shape).numel, _facts_of(shape, batch)
    budgets = {Tier.DEVICE: _device_budget(machine)}
    for tier in (Tier.HOST, Tier.NVME):
        needed = needed_nbytes(plan, tier)
        budgets[tier] = needed + _WINDOW_NBYTES if needed else 0
    if spilled:  # with all of RAM they would be read from the disk once
        best = _solved(shape, batch, machine, budgets, spilled)
    traffic = update_traffic(plan.record_formats[Tier.HOST], _ITEMSIZE, _ITEMSIZE)
    train = {"model": shape.model(), "batch": batch, "sequence": SEQUENCE}
    return Case(
        shape=shape, batch=batch, numel=numel,
        config={**_settings(shape, budgets, spilled), "train": train},
        device_budget_nbytes=budgets[Tier.DEVICE],
        record_nbytes_on_nvme=plan.expected[Tier.NVME].get(StateClass.OPTIMIZER, 0),
        adam_nbytes=int(traffic * numel), flops=facts.forward.flops + facts.backward.flops,
        model_flops=3 * facts.forward.flops,
        predicted_s=best.seconds, estimated_s=_estimate_s(best, budgets, numel, machine),
    )  # fmt: skip


def _estimate_s(
    best: Candidate, budgets: Mapping[Tier, int], numel: int, machine: GpuMachine
) -> float:
    """The seconds from the start of the process to its end: a rough estimate, on the high side."""
    build = budgets[Tier.HOST] / machine.touch_bytes_per_s
    build += 4 * numel * _LOAD_PASSES / _LOAD_BYTES_PER_S
    build += best.plan.total(Tier.NVME) / machine.speeds.nvme_write_bytes_per_s
    return _STARTED_S + build + (STEPS + 1) * best.seconds  # closing does the last one's update


def _settings(shape: Shape, budgets: Mapping[Tier, int], spilled: int) -> dict[str, Any]:
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
