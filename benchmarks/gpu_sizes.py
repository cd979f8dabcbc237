"""The cases of the step benchmark: a few Llama shapes, and whether a machine can hold them.

The planner says what each takes: bf16 with a split master and fp32 moments, all of them in the host
tier but for the share of the optimizer's records that a case has on nvme.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu_machine import GpuMachine
from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.planning.activations.facts import ActivationFacts
from offload.planning.activations.trace import trace_activations
from offload.planning.choice.solver import Candidate, RunFacts, solve
from offload.planning.machine.baseline import known_baseline
from offload.planning.plan.estimate import Workload
from offload.planning.plan.plan import Hardware, needed_nbytes, speculative_groups
from offload.planning.step.step_time import update_traffic
from offload.process.machine import cpu_count
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.zero.groups.model_shape import ModelShape
from offload.zero.groups.parameter_grouping import group_parameters

GIB = 1 << 30
BATCH, SEQUENCE = 16, 1024
STEPS = 4  # one to warm up, then three that count

_PRECISION, _ITEMSIZE = "bf16", 2
_WINDOW_NBYTES = 1 * GIB  # beside what a tier needs at least
_SPARE_NBYTES = 2 * GIB  # of RAM: what CUDA's libraries take of it is a round figure
_DEVICE_BUDGET_NBYTES = 24 * GIB
_DISK_SHARE = 0.9  # of what is free
_BUILD_S_PER_PARAMETER = 12e-9  # from start to end beside the steps, as measured beside an H100


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


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("0.15 B", 8, 1024, 16, 16, 4096, 8192),
        Shape("3.6 B", 28, 3072, 24, 8, 8192, 128256),
        Shape("8 B", 32, 4096, 32, 8, 14336, 128256),
        Shape("13 B", 40, 5120, 40, 40, 13824, 32000),
    )
}

# Of host memory. By its formula 18; 22 were measured on a smaller model.
DEEPSPEED_NBYTES_PER_PARAMETER = 22


@dataclass(frozen=True)
class Case:
    """The model and configuration to train, and the work of a step."""

    shape: Shape
    numel: int
    config: dict[str, Any]  # all but the folder for files
    device_budget_nbytes: int
    record_nbytes_on_nvme: int
    adam_nbytes: int  # of a step, over the memory bus
    flops: float  # of a step, each block's second forward included
    model_flops: float  # without it
    predicted_s: float  # of a step, by the planner

    @property
    def tokens(self) -> int:
        """The number of tokens per step."""
        return BATCH * SEQUENCE

    @property
    def estimated_s(self) -> float:
        """The seconds from the start of the process to its end: a rough estimate."""
        steps = STEPS + 1  # closing does the last one's update
        return _BUILD_S_PER_PARAMETER * self.numel + steps * self.predicted_s

    @property
    def min_to_device_nbytes(self) -> int:
        """The bytes of weights that every step has to copy: each new weight once, and once more in
        backward those that the device's budget could not keep."""
        return self.weights_nbytes + max(0, self.weights_nbytes - self.device_budget_nbytes)

    @property
    def weights_nbytes(self) -> int:
        """The number of bytes of the weights; as many bytes of gradients have to come back."""
        return _ITEMSIZE * self.numel


def case_of(shape: Shape, machine: GpuMachine, spilled: int = 0) -> Case | str:
    """The case of a shape with `spilled` per cent of the optimizer's records on nvme, or why the
    machine cannot hold it."""
    best = _solved(shape, machine, {}, spilled)
    if not best.fits:
        return best.shortfalls[0].message.split(";")[0]
    if best.plan.room_nbytes(Tier.DEVICE) < _device_budget(machine):
        return f"{BATCH} sequences of {SEQUENCE} tokens leave too little of the device"
    return _laid_out(shape, best, spilled, machine)


def deepspeed_short(case: Case, machine: GpuMachine) -> str:
    """Why DeepSpeed cannot train the case; empty if there is enough RAM for it."""
    needed = DEEPSPEED_NBYTES_PER_PARAMETER * case.numel + _SPARE_NBYTES
    short = needed - machine.host_nbytes
    return f"DeepSpeed needs {format_bytes(short)} more RAM than there is" if short > 0 else ""


def _device_budget(machine: GpuMachine) -> int:
    return min(_DEVICE_BUDGET_NBYTES, machine.device_nbytes // 2)


def _solved(
    shape: Shape, machine: GpuMachine, budgets: Mapping[Tier, int], spilled: int
) -> Candidate:
    """The planner's best candidate; without `budgets`, with all memory that the machine has."""
    facts = _facts_of(shape)
    base = known_baseline(_PRECISION, gpu=True)
    known = RunFacts(Workload(BATCH, SEQUENCE), machine.speeds, lambda _: facts, base)
    ram, disk = machine.host_nbytes - _SPARE_NBYTES, int(_DISK_SHARE * machine.disk_nbytes)
    hardware = Hardware(machine.device_nbytes, ram, ram, disk, cores=cpu_count())
    config = OffloadConfig.load(_settings(shape, budgets, spilled))
    return solve(config, _shape_of(shape), hardware, known).best


def _laid_out(shape: Shape, best: Candidate, spilled: int, machine: GpuMachine) -> Case:
    """The case with budgets that hold what is needed, and a window or what undoes updates."""
    plan, numel, facts = best.plan, _shape_of(shape).numel, _facts_of(shape)
    budgets = {Tier.DEVICE: _device_budget(machine)}
    for tier in (Tier.HOST, Tier.NVME):
        needed = needed_nbytes(plan, tier)
        budgets[tier] = needed + _WINDOW_NBYTES if needed else 0
    # what undoes updates that are made in backward
    old = sum(each.memory for each in speculative_groups(plan, best.config).values())
    budgets[Tier.HOST] += max(0, old - _WINDOW_NBYTES)
    if spilled:  # with all of RAM they would be read from the disk once
        best = _solved(shape, machine, budgets, spilled)
    traffic = update_traffic(plan.record_format, _ITEMSIZE, _ITEMSIZE)
    train = {"model": shape.model(), "batch": BATCH, "sequence": SEQUENCE}
    return Case(
        shape=shape, numel=numel,
        config={**_settings(shape, budgets, spilled), "train": train},
        device_budget_nbytes=budgets[Tier.DEVICE],
        record_nbytes_on_nvme=plan.expected[Tier.NVME].get(StateClass.OPTIMIZER, 0),
        adam_nbytes=int(traffic * numel), flops=facts.forward.flops + facts.backward.flops,
        model_flops=3 * facts.forward.flops, predicted_s=best.seconds,
    )  # fmt: skip


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
    return group_parameters(build_meta_model(_config_of(shape)), ()).shape()


@functools.cache
def _facts_of(shape: Shape) -> ActivationFacts:
    config = _config_of(shape)
    workload = Workload(BATCH, SEQUENCE)
    return trace_activations(build_meta_model(config), config, workload, device="cuda")


def _config_of(shape: Shape) -> OffloadConfig:
    return OffloadConfig.load(_settings(shape, {}, 0))
