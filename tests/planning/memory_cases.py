"""Runs whose memory is predicted and then measured: configurations drawn by a seed."""

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.planning.activations.facts import ActivationFacts, PassCost
from offload.planning.activations.trace import trace_activations
from offload.planning.choice.solver import solve
from offload.planning.machine.baseline import Baseline
from offload.planning.plan.estimate import MemoryEstimate, Workload
from offload.planning.plan.plan import Hardware, needed_nbytes
from offload.planning.step.memory import PlannedMemory
from offload.process.child import child_environment
from offload.tiers.errors import ConfigError
from offload.tiers.tier import TIERS, Tier
from offload.zero.groups.model_shape import ModelShape
from offload.zero.groups.parameter_grouping import group_parameters

ROOT = Path(__file__).parents[2]
_PLENTY = Hardware(0, 1 << 40, 1 << 40, 1 << 42)
_NOTHING = PassCost(0, 0, 0)

# layers, hidden, heads, MLP, vocabulary, chunks that fit the size
SIZES: dict[str, tuple[int, int, int, int, int, tuple[int, ...]]] = {
    "tiny": (3, 128, 4, 384, 512, (1 << 13, 1 << 14)),  # 0.7 M parameters
    "small": (6, 384, 6, 1024, 1024, (1 << 15, 1 << 16)),  # 11 M
    "60M": (8, 640, 10, 2560, 4096, (1 << 17, 1 << 18)),
    "151M": (8, 1024, 16, 4096, 8192, (1 << 18, 1 << 19)),
    "300M": (16, 1152, 16, 4096, 8192, (1 << 19, 1 << 20)),
}
_HOMES: list[Any] = [
    "host", "nvme", "device", {"host": "40%", "nvme": "60%"}, {"device": "50%", "nvme": "50%"},
]  # fmt: skip
_KINDS: list[dict[str, Any]] = [
    {"type": "adamw"}, {"type": "adamw"}, {"type": "adamw", "amsgrad": True}, {"type": "lion"},
    {"type": "adagrad"}, {"type": "sgd"}, {"type": "sgd", "momentum": 0.9},
]  # fmt: skip
_STATES: list[Any] = ["fp32", "fp32", "bf16", "int8", {"host": "fp32", "nvme": "int8"}]


@dataclass(frozen=True)
class Case:
    """One run: an engine's configuration with its `train:` section, and how it is driven."""

    name: str
    config: dict[str, Any]
    own_loop: bool = False  # as `offload train` drives it: updates within backward

    def loaded(self) -> OffloadConfig:
        config = OffloadConfig.load(self.config)
        return config.owning_the_loop() if self.own_loop else config

    def shape(self) -> ModelShape:
        config = self.loaded()
        return group_parameters(build_meta_model(config), config.groups.blocks).shape()


def draw(size: str, seed: int, folder: Path) -> Case:
    """A case of `size` that a plan can be made for; the same for the same seed."""
    for attempt in range(100):
        rng = random.Random(f"{size} {seed} {attempt}")
        try:
            return _drawn(size, seed, rng, folder)
        except ConfigError:  # two choices that contradict each other
            continue
    raise AssertionError(f"no valid case of {size} in 100 draws")


def _drawn(size: str, seed: int, rng: random.Random, folder: Path) -> Case:
    layers, hidden, heads, mlp, vocab, chunks = SIZES[size]
    precision = rng.choice(["fp32", "bf16", "bf16"])
    passes = rng.choice([1, 1, 2, 1, 1])
    checkpoint = rng.choice([False, False, True, "selective"])
    away = rng.choice(["device", "device", "nvme"])
    placement: dict[str, Any] = {
        "parameters": rng.choice(["host", "nvme", "device"]),
        "gradients": rng.choice(["host", "host", "nvme"]),
        "optimizer": rng.choice(_HOMES),
    }
    if passes > 1 and precision != "fp32":
        placement["gradients"] = "host"
    optimizer = {**rng.choice(_KINDS), "states": rng.choice(_STATES), "chunk": rng.choice(chunks)}
    batch, sequence = rng.choice([(4, 64), (4, 128), (8, 64)])
    config: dict[str, Any] = {
        "device": "cpu",
        "precision": precision,
        "budget": {"device": "4TiB", "host": "4TiB", "nvme": "4TiB"},
        "nvme": {"paths": [str(folder)]},
        "placement": {**placement, "activations": {"tier": away, "checkpoint": checkpoint}},
        "optimizer": optimizer,
        "gradient_accumulation_steps": passes,
        "train": {
            "model": {
                "layers": layers, "hidden": hidden, "heads": heads, "mlp": mlp, "vocab": vocab,
                "tied": rng.random() < 0.5,
            },
            "batch": batch, "sequence": sequence,
        },
    }  # fmt: skip
    host, nvme, own_loop = rng.choice(["least", "tight", "ample"]), rng.random(), rng.random() < 0.3
    case = Case(f"{size}-{seed}", config, own_loop)
    budget = _budgets(case, host, tight_nvme=nvme < 0.5)
    return Case(case.name, {**config, "budget": budget}, own_loop)


def _budgets(case: Case, host: str, *, tight_nvme: bool) -> dict[str, int]:
    """Budgets that the plan of this case just needs, or more."""
    plan = solve(case.loaded(), case.shape(), _PLENTY).best.plan
    # what activations get is all that is left: not a need
    window = plan.activations.window_nbytes - (8 << 20) if plan.activations is not None else 0
    needed = {tier: needed_nbytes(plan, tier) for tier in TIERS}
    needed[Tier.HOST] -= window
    copies = plan.total(Tier.NVME)
    factor = {"least": 0.0, "tight": 0.3, "ample": 1.2}[host]
    budgets = {
        Tier.DEVICE: int(needed[Tier.DEVICE] * 1.1) + (1 << 20),
        Tier.HOST: int(needed[Tier.HOST] * 1.01 + copies * factor) + (1 << 20),
        Tier.NVME: int(needed[Tier.NVME] * (1.02 if tight_nvme else 4)) + (64 << 20),
    }
    return {str(tier): nbytes for tier, nbytes in budgets.items()}


def predict(case: Case, baseline: Baseline, *, activations: bool) -> MemoryEstimate:
    """Peaks of a case; without `activations` those of the ledger alone are right."""
    config, shape = case.loaded(), case.shape()
    plan = solve(config, shape, _PLENTY).best.plan
    train = config.train
    workload = Workload(train.batch, train.sequence, config.gradient_accumulation_steps)
    facts = ActivationFacts(0, 0, 0, _NOTHING, _NOTHING)
    if activations or plan.activations is not None:
        facts = trace_activations(build_meta_model(config), config, workload)
    return PlannedMemory(plan, config, shape, facts, workload, baseline).estimate()


def measure(cases: list[Case]) -> list[dict[str, Any]]:
    """Run cases one after the other in one fresh process: ledger peaks of each, and the peak RAM
    of the process so far."""
    todo = [{"config": case.config, "own_loop": case.own_loop} for case in cases]
    done = subprocess.run(
        [sys.executable, "-m", "tests.planning.memory_child"], cwd=ROOT, text=True,
        input=json.dumps(todo), capture_output=True, check=False,
        env=child_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    measured = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(measured) == len(cases), done.stdout
    return measured
