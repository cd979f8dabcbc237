"""Predicted bytes per step are those that the runtime moves; predicted time follows what it rests on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

import offload
import offload.homes
from offload.config import OffloadConfig
from offload.engine import Engine
from offload.planning.activation_facts import ActivationFacts, PassCost
from offload.planning.estimate import StepEstimate
from offload.planning.plan import Hardware
from offload.planning.planner import make_plan, resolved_config
from offload.planning.speeds import Speeds
from offload.planning.step_program import Verb, write_program
from offload.planning.step_time import estimate_step
from offload.planning.traffic import Bytes, step_traffic
from offload.planning.workload import Workload
from offload.swap.io_request import IORequest
from offload.swap.threads_backend import ThreadsBackend
from offload.tiers.errors import ConfigError
from offload.train.model import build_meta_model
from offload.zero.discovery import discover
from offload.zero.model_shape import ModelShape

BASE: Mapping[str, Any] = {
    "train": {
        "model": {
            "shape": "llama", "layers": 4, "hidden": 128, "heads": 4, "mlp": 384, "vocab": 512,
            "max_sequence": 64, "tied": False,
        },
        "batch": 2, "sequence": 16,
    },
    "budget": {"device": "8MiB", "host": "64MiB", "nvme": "1GiB"},
    "optimizer": {"chunk": 65536},
    "clip_grad_norm": 1.0,
}  # fmt: skip
WORK = Workload(2, 16)
FACTS = ActivationFacts(
    0, 0, 0, "", PassCost(int(1e9), int(1e7), 100), PassCost(int(2e9), int(2e7), 200)
)
SPEEDS = Speeds(
    name="made up", gpu=False, matmul_flops_per_s={"fp32": 1e11, "bf16": 4e11},
    compute_bytes_per_s=1e10, operation_s=1e-6, host_bytes_per_s=5e10,
    optimizer_parameters_per_s={"fp32": 1.8e9}, nvme_read_bytes_per_s=1e9,
    nvme_write_bytes_per_s=2e9, nvme_mixed_bytes_per_s=2 / (1 / 1e9 + 1 / 2e9),
    host_to_device_bytes_per_s=1e10, device_to_host_bytes_per_s=1e10,
)  # fmt: skip


def homes(parameters: str, gradients: str, optimizer: str) -> str:
    return (
        f"placement={{parameters: {parameters}, gradients: {gradients}, optimizer: {optimizer}}}"
    )


ALL = homes("nvme", "nvme", "nvme")
CASES: Mapping[str, tuple[str, ...]] = {
    "everything on nvme": (ALL, "budget.host=10MiB"),
    "room for some copies": (ALL, "budget.host=13MiB"),
    "room for all copies": (ALL, "budget.host=64MiB"),
    "no prefetch": (ALL, "budget.host=10MiB", "prefetch=0"),
    "recomputation": (ALL, "budget.host=10MiB", "placement.activations.checkpoint=true"),
    "accumulation": (ALL, "budget.host=10MiB", "gradient_accumulation_steps=3"),
    "micro-batches": (ALL, "budget.host=10MiB", "micro_batches=2"),
    "bf16": (ALL, "budget.host=6MiB", "precision=bf16"),
    "bf16 sums on host": (
        homes("nvme", "host", "nvme"), "budget.host=12MiB", "precision=bf16",
        "gradient_accumulation_steps=2",
    ),
    "parameters alone": (homes("nvme", "host", "host"), "budget.host=22MiB"),
    "records alone": (homes("host", "host", "nvme"), "budget.host=14MiB"),
    "records, room for all": (homes("host", "host", "nvme"), "budget.host=32MiB"),
    "half of the records": (
        homes("host", "host", "{host: 50%, nvme: 50%}"), "budget.host=18MiB",
    ),
    "gradients and records": (homes("host", "nvme", "nvme"), "budget.host=12MiB"),
    "all three tiers": (
        homes("{device: 20%, host: 30%, nvme: 50%}", "nvme", "{host: 30%, nvme: 70%}"),
        "budget.host=14MiB",
    ),
    "tied weights, gpt": (
        ALL, "budget.host=10MiB", "train.model.shape=gpt", "train.model.tied=true",
    ),
    "nothing on nvme": (homes("host", "host", "host"),),
}  # fmt: skip
NOTHING_KEPT = ("everything on nvme", "no prefetch")


class AtOnce(ThreadsBackend):
    """Every move is over when it was asked for: what a prediction takes for granted."""

    def _start(self, request: IORequest) -> None:
        if request.before is not None:
            request.before()
        for piece in self._cut(request):
            self._move(piece)
            self._piece_ended(piece)


def shape_of(config: OffloadConfig) -> ModelShape:
    return discover(build_meta_model(config), config.groups.blocks).shape()


def train(engine: Engine, config: OffloadConfig, steps: int) -> list[Mapping[str, int]]:
    """Bytes moved after each step, all of its work done."""
    passes = config.gradient_accumulation_steps
    tokens = torch.arange(2 * 17).reshape(2, 17) % 512
    moved = []
    for _ in range(steps):
        for _ in range(passes):
            loss = engine.module(tokens[:, :-1], tokens[:, 1:]).loss
            (loss / passes).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        engine.settle()
        moved.append(engine.report().bytes_moved)
    return moved


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.homes, "open_backend", lambda name, **options: AtOnce())


@pytest.mark.parametrize("case", CASES)
def test_a_step_moves_the_predicted_bytes(case: str, at_once: None) -> None:
    config = OffloadConfig.load(BASE, CASES[case])
    shape = shape_of(config)
    with offload.initialize(build_meta_model(config), config) as engine:
        moved = train(engine, config, 5)
        workload = replace(WORK, passes=config.gradient_accumulation_steps)
        said = step_traffic(engine.plan, engine.config, shape, None, workload).total
    read, written = (moved[-1][link] - moved[-2][link] for link in ("nvme read", "nvme write"))
    assert said.written == written
    assert said.read == pytest.approx(read, rel=0.02)


@pytest.mark.parametrize("case", CASES)
def test_a_step_moves_the_predicted_bytes_behind_compute(case: str) -> None:
    """With threads, moves end when they end: what is kept may differ a little, what is written not
    at all."""
    config = OffloadConfig.load(BASE, (*CASES[case], "optimizer.chunk=65536"))
    shape = shape_of(config)
    with offload.initialize(build_meta_model(config), config) as engine:
        moved = train(engine, config, 5)
        workload = replace(WORK, passes=config.gradient_accumulation_steps)
        said = step_traffic(engine.plan, engine.config, shape, None, workload).total
    assert said.written == moved[-1]["nvme write"] - moved[-2]["nvme write"]
    states = sum(g.parameters + g.gradients + g.optimizer for g in engine.plan.groups)
    read = moved[-1]["nvme read"] - moved[-2]["nvme read"]
    assert abs(said.read - read) <= 0.15 * states
