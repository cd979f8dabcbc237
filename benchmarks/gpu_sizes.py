"""The cases of the step benchmark: a table, and whether a machine can hold each of them.

The planner says what a case takes: bf16 with a split master and fp32 moments. Where a case names no
homes of its states, the planner chooses them, for the whole card and the batch.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_machine import GpuMachine
from offload.bench.contenders import all_on
from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.planning.activations.facts import ActivationFacts
from offload.planning.activations.trace import trace_activations
from offload.planning.choice.planner import chosen_config
from offload.planning.choice.solver import Candidate, RunFacts, solve
from offload.planning.machine.baseline import known_baseline
from offload.planning.plan.estimate import LinkTime, Workload
from offload.planning.plan.plan import Hardware, needed_nbytes, speculative_groups
from offload.planning.step.step_time import update_traffic
from offload.process.machine import cpu_count
from offload.tiers.ledger import StateClass
from offload.tiers.tier import TIERS, Tier
from offload.tiers.units import format_bytes
from offload.zero.groups.model_shape import ModelShape
from offload.zero.groups.parameter_grouping import group_parameters

GIB = 1 << 30
SEQUENCE = 1024

_PRECISION, _ITEMSIZE = "bf16", 2
_WINDOW_NBYTES = 1 * GIB  # beside what a tier needs at least
_SPARE_NBYTES = 2 * GIB  # of RAM: what CUDA's libraries take of it is a round figure
_DISK_SHARE = 0.9  # of what is free
_WORTH_A_LIMIT = 1.25
_BUILD_S_PER_PARAMETER = 12e-9  # from start to end beside the steps, as measured beside an H100


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int
) -> dict[str, int | bool]:
    """A shape as `train.model` has it; embedding and head are apart."""
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "mlp": mlp,
        "vocab": vocab, "tied": False,
    }  # fmt: skip


SHAPES = {
    "0.15 B": _llama(8, 1024, 16, 16, 4096, 8192),
    "1.6 B": _llama(24, 2048, 16, 8, 8192, 32000),
    "3.6 B": _llama(28, 3072, 24, 8, 8192, 128256),
    "8 B": _llama(32, 4096, 32, 8, 14336, 128256),
    "13 B": _llama(40, 5120, 40, 40, 13824, 32000),
}


# ---------------------------------------------------------------- the table
@dataclass(frozen=True)
class Training:
    """An entry of the table."""

    shape: str
    label: str  # after the name of its shape
    keys: tuple[str, ...] = all_on("host")  # of the configuration; homes that none names are open
    passes: int = 1
    batch: int = 16
    sequence: int = SEQUENCE
    steps: int = 4  # one to warm up, then those that count
    card_nbytes: int | None = None  # of the GPU's memory: budget.gpu

    @property
    def name(self) -> str:
        """The label of its row."""
        return f"{self.shape}, {self.label}"


# fp32 sums of gradients take twice their memory: 128 GiB of RAM do not hold all of 8 B then
_TENTH = all_on("host", optimizer="{device: 10%, host: 90%}")
_THREE_TIERS = all_on("host", optimizer="{device: 35%, host: 50%, nvme: 15%}")
_AUTO = {"auto": ((), None), "auto on 80 GB": ((), 80 * 10**9)}
_HOMES: dict[int, dict[str, tuple[tuple[str, ...], int | None]]] = {  # by passes per step
    1: {"host": (all_on("host"), None), **_AUTO},
    8: {"host, a tenth of records on the device": (_TENTH, None), **_AUTO},
}
_CLIPPING = {"": (), ", unclipped": ("clip_grad_norm=null", "optimizer.in_backward=true")}
_A = [
    Training("0.15 B", "host"),  # small enough for a GPU that computes nothing
    *(
        Training(
            "8 B", f"{where}{clipping}{', 8 passes' if passes > 1 else ''}", (*homes, *keys),
            passes, steps=4 if passes == 1 else 2, card_nbytes=card,
        )
        for clipping, keys in _CLIPPING.items()
        for passes, places in _HOMES.items()
        for where, (homes, card) in places.items()
    ),
    Training("8 B", "host, every step clips", (*all_on("host"), "clip_grad_norm=1e-4")),
]  # fmt: skip
_C = [
    Training("8 B", "64 k tokens", (), batch=1, sequence=1 << 16, steps=2),
    Training("8 B", "auto on 24 GiB", (), card_nbytes=24 * GIB),
    Training("13 B", "three tiers", _THREE_TIERS, steps=2),
    *(
        Training("1.6 B", f"host, chunks of {size} M",
                 (*all_on("host"), f"optimizer.chunk={size << 20}"))
        for size in (2, 16, 64)
    ),
    Training("3.6 B", "host"),
    Training("8 B", "128 k tokens, MLPs in tiles", ("placement.activations.tiled_mlp=16384",),
             batch=1, sequence=1 << 17, steps=2),
]  # fmt: skip
TRAININGS = {f"step:{training.name}": training for training in (*_A, *_C)}
_NAMES = list(TRAININGS)
CALLS: Mapping[str, Sequence[str]] = {  # the parts of each call in their order
    "a": _NAMES[: len(_A)],
    "b": ("tests", "inference"),
    "c": _NAMES[len(_A) :],
}


@dataclass(frozen=True)
class Case:
    """The model and configuration to train, and the work of a step."""

    training: Training
    numel: int
    config: dict[str, Any]  # all but the folder for files
    adam_nbytes: int  # of a step's updates on the CPU, over the memory bus
    flops: float  # of a step, each block's second forward included
    model_flops: float  # without it
    predicted_s: float  # of a step, by the planner
    links: tuple[LinkTime, ...]  # likewise

    @property
    def tokens(self) -> int:
        """The number of tokens per step."""
        return self.training.batch * self.training.sequence * self.training.passes

    def estimated_s(self, build_s_per_parameter: float) -> float:
        """The seconds from the start of the process to its end: a rough estimate, also of what a
        parameter takes, where that is not known (0)."""
        steps = self.training.steps + 1 / self.training.passes  # closing does the last one's update
        build_s = (build_s_per_parameter or _BUILD_S_PER_PARAMETER) * self.numel
        return build_s + steps * self.predicted_s

    def nbytes_over(self, link: str) -> int:
        """The bytes that the plan moves over a link in a step."""
        return sum(each.nbytes for each in self.links if each.name == link)


def case_of(training: Training, machine: GpuMachine) -> Case | str:
    """The case of an entry, or why the machine cannot hold it."""
    card = training.card_nbytes
    if card is not None and machine.device_nbytes < _WORTH_A_LIMIT * card:
        return f"the GPU itself has not much more than {format_bytes(card)}"
    best = _solved(training, machine)
    if not best.fits:
        short = [each.message.split(";")[0] for each in best.shortfalls]
        return short[0] if short else "activations leave too little of the device"
    return _laid_out(training, best)


def _solved(training: Training, machine: GpuMachine) -> Candidate:
    """The planner's best candidate, with all memory that the machine has."""
    facts = _facts_of(training)
    work = Workload(training.batch, training.sequence, training.passes)
    base = known_baseline(_PRECISION, gpu=True)
    known = RunFacts(work, machine.speeds, lambda _: facts, base)
    ram, disk = machine.host_nbytes - _SPARE_NBYTES, int(_DISK_SHARE * machine.disk_nbytes)
    hardware = Hardware(machine.device_nbytes, ram, ram, disk, cores=cpu_count())
    return solve(_config(training), _shape_of(training.shape), hardware, known).best


def _laid_out(training: Training, best: Candidate) -> Case:
    """The case with the budgets that the planner chose for the device, and elsewhere those that
    hold what is needed, and a window or what undoes updates: with all of RAM, records on nvme would
    be read once."""
    plan, passes, step = best.plan, training.passes, best.step
    facts = _facts_of(training)
    needed = {tier: needed_nbytes(plan, tier) for tier in TIERS}
    old = sum(each.memory for each in speculative_groups(plan, best.config).values())
    more = {Tier.HOST: max(old, _WINDOW_NBYTES), Tier.NVME: _WINDOW_NBYTES}
    budget = {str(tier): n + more.get(tier, 0) if n else 0 for tier, n in needed.items()}
    config = chosen_config(best.config, plan).model_dump(mode="json", exclude_none=True)
    budget[str(Tier.DEVICE)] = plan.budgets[Tier.DEVICE]
    config["budget"] |= budget
    records = plan.homes[StateClass.OPTIMIZER]
    on_cpu = 1 - records.get(Tier.DEVICE, 0) / sum(records.values())
    numel = _shape_of(training.shape).numel
    traffic = update_traffic(plan.record_format, _ITEMSIZE, _ITEMSIZE) * numel
    assert step is not None, "the work of a step is known"
    return Case(
        training, numel, config, int(traffic * on_cpu),
        passes * (facts.forward.flops + facts.backward.flops), 3 * passes * facts.forward.flops,
        step.seconds, step.links,
    )  # fmt: skip


def _config(training: Training) -> OffloadConfig:
    settings = {
        "device": "cuda",
        "precision": _PRECISION,
        "budget": {"gpu": training.card_nbytes},
        "placement": {"activations": {"tier": "device", "checkpoint": True}},
        "optimizer": {"type": "adamw", "lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "clip_grad_norm": 1e4,  # no step clips, as in most of a long run
        "gradient_accumulation_steps": training.passes,
        "train": {
            "model": SHAPES[training.shape] | {"max_sequence": training.sequence},
            "batch": training.batch, "sequence": training.sequence,
        },
    }  # fmt: skip
    return OffloadConfig.load(settings, training.keys)


# ---------------------------------------------------------------- what a shape is, by itself
@functools.cache
def _shape_of(shape: str) -> ModelShape:
    return group_parameters(build_meta_model(_config(Training(shape, ""))), ()).shape()


def _facts_of(training: Training) -> ActivationFacts:
    """The cost of a pass, which is the same wherever states are."""
    keys = tuple(key for key in training.keys if key.startswith("placement.activations."))
    return _facts(training.shape, training.batch, training.sequence, keys)


@functools.cache
def _facts(shape: str, batch: int, sequence: int, keys: tuple[str, ...]) -> ActivationFacts:
    config = _config(Training(shape, "", keys, batch=batch, sequence=sequence))
    workload = Workload(batch, sequence)
    return trace_activations(build_meta_model(config), config, workload, device="cuda")
