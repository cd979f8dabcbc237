"""Predicted bytes per step are those that the runtime moves; predicted time follows from speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import offload
import offload.memory.tier_manager
from offload.config import OffloadConfig
from offload.engine import Engine
from offload.gpt import build_meta_model
from offload.planning.activations.facts import ActivationFacts, PassCost
from offload.planning.choice.planner import make_plan, resolved_config
from offload.planning.machine.speeds import Speeds
from offload.planning.plan.estimate import StepEstimate
from offload.planning.plan.plan import Hardware
from offload.planning.plan.workload import Workload
from offload.planning.step import planned_run, traffic
from offload.planning.step.step_time import estimate_step
from offload.planning.step.traffic import step_traffic
from offload.swap.io.io_request import IORequest
from offload.swap.io.threads_backend import ThreadsBackend
from offload.tiers.errors import ConfigError
from offload.zero.groups.discovery import discover
from offload.zero.groups.model_shape import ModelShape
from offload.zero.step.chunks import GroupUpdate
from offload.zero.step.update import UpdateQueue
from tests.offload.engine_cases import plan_for_a_gpu

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
    "clip_grad_norm": 1e9,  # which changes nothing, so that updates are made in backward
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
    return f"placement={{parameters: {parameters}, gradients: {gradients}, optimizer: {optimizer}}}"


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


def let_all_be_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves, and updates in backward."""
    at_once = lambda name, **options: AtOnce()  # noqa: E731
    monkeypatch.setattr(offload.memory.tier_manager, "open_backend", at_once)
    submit = UpdateQueue.submit

    def update_at_once(
        queue: UpdateQueue, updates: Sequence[GroupUpdate], *, first: bool = False
    ) -> None:
        submit(queue, updates, first=first)
        if first:
            for update in updates:
                update.ready.wait()

    monkeypatch.setattr(UpdateQueue, "submit", update_at_once)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    let_all_be_done_at_once(monkeypatch)


# What is left in memory when updates begin depends on what the first steps left there.
KEPT_BY_CHANCE = ("room for some copies", "accumulation", "tied weights, gpt")


@pytest.mark.sample(4)
@pytest.mark.parametrize("clips", [False, True], ids=["updated in backward", "clipped"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_moves_the_predicted_bytes(
    case: str, clips: bool, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that clips makes its updates behind the next forward, on a thread of its own."""
    exact = not clips and case not in KEPT_BY_CHANCE
    if clips:
        for module in (traffic, planned_run):
            monkeypatch.setattr(module, "tried_groups", lambda plan, config: {})
    config = OffloadConfig.load({**BASE, "clip_grad_norm": 1e-6 if clips else 1e9}, CASES[case])
    shape = shape_of(config)
    with offload.initialize(build_meta_model(config), config) as engine:
        moved = train(engine, config, 5)
        workload = replace(WORK, passes=config.gradient_accumulation_steps)
        said = step_traffic(engine.plan, engine.config, shape, None, workload).total
    read, written = (moved[-1][link] - moved[-2][link] for link in ("nvme read", "nvme write"))
    if exact:
        assert (said.read, said.written) == (read, written)
    assert said.written == pytest.approx(written, rel=0.03)
    assert said.read == pytest.approx(read, rel=0.13)


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", ["everything on nvme", "records alone", "all three tiers"])
def test_a_step_moves_the_predicted_bytes_behind_compute(case: str) -> None:
    """With threads, moves end when they end: what is kept may differ."""
    config = OffloadConfig.load(BASE, CASES[case])
    shape = shape_of(config)
    with offload.initialize(build_meta_model(config), config) as engine:
        moved = train(engine, config, 5)
        workload = replace(WORK, passes=config.gradient_accumulation_steps)
        said = step_traffic(engine.plan, engine.config, shape, None, workload).total
    written = moved[-1]["nvme write"] - moved[-2]["nvme write"]
    assert said.written == pytest.approx(written, rel=0.1)
    states = sum(g.parameters + g.gradients + g.optimizer for g in engine.plan.groups)
    read = moved[-1]["nvme read"] - moved[-2]["nvme read"]
    assert abs(said.read - read) <= 0.3 * states


GPU_CASES: Mapping[str, tuple[str, ...]] = {
    "room for one block": ("budget.device=2MiB", homes("host", "host", "host")),
    "room for all": ("budget.device=16MiB", homes("host", "host", "host")),
    "parameters on nvme": ("budget.device=2MiB", homes("nvme", "host", "nvme")),
    "parameters on the device": ("budget.device=8MiB", homes("device", "host", "host")),
    "accumulation": (
        "budget.device=2MiB", homes("host", "host", "host"), "gradient_accumulation_steps=2",
    ),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", GPU_CASES)
def test_a_step_sends_the_predicted_bytes_to_the_device(
    case: str, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory stands in for the device's, as in `tests/offload/test_mirror.py`."""
    plan_for_a_gpu(monkeypatch)
    config = OffloadConfig.load(BASE, GPU_CASES[case])
    shape = shape_of(config)
    with offload.initialize(build_meta_model(config), config) as engine:
        moved = train(engine, config, 5)
        workload = replace(WORK, passes=config.gradient_accumulation_steps)
        said = step_traffic(engine.plan, engine.config, shape, None, workload).total
    sent = moved[-1]["host to device"] - moved[-2]["host to device"]
    assert said.to_device == pytest.approx(sent, rel=0.02)
    assert said.written == moved[-1]["nvme write"] - moved[-2]["nvme write"]


# ---------------------------------------------------------------- the program


# ---------------------------------------------------------------- the time
def step_of(*overrides: str, speeds: Speeds = SPEEDS, facts: ActivationFacts = FACTS,
            workload: Workload = WORK, gpu: int = 0) -> StepEstimate:  # fmt: skip
    config = OffloadConfig.load(BASE, ["budget.host=10MiB", *overrides])
    shape = shape_of(config)
    hardware = Hardware(gpu, 1 << 34, 1 << 34, 1 << 36)
    plan = make_plan(config, shape, hardware)
    resolved = resolved_config(config, plan, "cuda" if gpu else "cpu")
    return estimate_step(plan, resolved, shape, facts, workload, speeds)


def test_a_step_takes_at_least_as_long_as_its_slowest_link() -> None:
    for overrides in ((ALL,), (homes("host", "host", "host"), "budget.host=64MiB")):
        step = step_of(*overrides)
        assert step.seconds >= max(link.seconds for link in step.links) * 0.999
        assert step.bottleneck in {link.name for link in step.links}


def test_a_faster_link_never_makes_a_step_slower() -> None:
    before = step_of(ALL).seconds
    for name in (
        "nvme_read_bytes_per_s", "nvme_write_bytes_per_s", "host_bytes_per_s",
        "compute_bytes_per_s", "nvme_mixed_bytes_per_s",
    ):  # fmt: skip
        faster = replace(SPEEDS, **{name: 2 * getattr(SPEEDS, name)})
        assert step_of(ALL, speeds=faster).seconds <= before * 1.002, name


def test_what_is_not_known_of_a_machine_is_said() -> None:
    with pytest.raises(ConfigError, match="precision: bf16: nothing is known"):
        step_of(ALL, "precision=bf16", speeds=replace(SPEEDS, matmul_flops_per_s={"fp32": 1e11}))
    with pytest.raises(ConfigError, match="the speed of a disk of made up is not known"):
        step_of(ALL, speeds=replace(SPEEDS, nvme_read_bytes_per_s=0.0))


def test_bytes_of_activations_on_nvme_are_written_and_read_beyond_the_window() -> None:
    keys = (homes("host", "host", "host"), "budget.host=64MiB", "placement.activations.tier=nvme")
    saved = 1 << 28
    step = step_of(*keys, facts=replace(FACTS, saved_nbytes=saved))
    moved = {link.name: link.nbytes for link in step.links}
    assert 0 < moved["nvme read"] < moved["nvme write"] < saved
    none = step_of(*keys, facts=replace(FACTS, saved_nbytes=1 << 20))
    assert none.written_nbytes == 0
