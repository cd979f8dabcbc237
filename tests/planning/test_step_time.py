"""Predicted bytes per step are those that the runtime moves; predicted time follows from speeds."""

import itertools
import random
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
from offload.planning.plan.chunk_and_prefetch import chunk_in_memory
from offload.planning.plan.estimate import StepEstimate, Workload
from offload.planning.plan.plan import Hardware
from offload.planning.step import planned_run
from offload.planning.step.program import total_of
from offload.planning.step.representatives import representatives
from offload.planning.step.step_time import estimate_step, step_traffic
from offload.swap.io.requests_and_retries import IORequest
from offload.swap.io.threads_backend import ThreadsBackend
from offload.swap.states.fetching import Fetchable, Fetcher
from offload.swap.threads.save_gate import SaveGate
from offload.tiers.errors import BudgetError, ConfigError
from offload.tiers.tier import Tier
from offload.zero.groups.model_shape import ModelShape
from offload.zero.groups.parameter_grouping import group_parameters
from offload.zero.step.chunks import GroupUpdate
from offload.zero.step.update import UpdateQueue
from tests.offload.engine_cases import plan_for_a_gpu

BASE: Mapping[str, Any] = {
    "train": {
        "model": {
            "layers": 4, "hidden": 128, "heads": 4, "mlp": 384, "vocab": 512,
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
    0, 0, 0, PassCost(int(1e9), int(1e7), 100), PassCost(int(2e9), int(2e7), 200)
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


class AtOnce(ThreadsBackend):
    """Every move is over when it was asked for: what a prediction takes for granted."""

    def _start(self, request: IORequest) -> None:
        if request.before is not None:
            request.before()
        for piece in self._cut(request):
            self._move(piece)
            self._piece_ended(piece)


def shape_of(config: OffloadConfig) -> ModelShape:
    return group_parameters(build_meta_model(config), config.groups.blocks).shape()


def train(
    engine: Engine, config: OffloadConfig, steps: int, *, settle: bool = False
) -> list[Mapping[str, int]]:  # fmt: skip
    """Bytes moved by each step. Updates behind it belong to the next one, unless they settle."""
    passes = config.gradient_accumulation_steps
    tokens = torch.arange(2 * 17).reshape(2, 17) % 256
    moved = [engine.report().bytes_moved]
    for _ in range(steps):
        for _ in range(passes):
            loss = engine.module(tokens[:, :-1], tokens[:, 1:]).loss
            (loss / passes).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        if settle:
            engine.settle()
        moved.append(engine.report().bytes_moved)
    return [
        {link: after[link] - before.get(link, 0) for link in after}
        for before, after in itertools.pairwise(moved)
    ]


class OneAfterTheOther:
    """Makes a run do what a prediction takes for granted: moves are over when they were asked for,
    updates in backward at once, and those of the step before when the forward comes to the
    group."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._admitted: set[int] = set()
        at_once = lambda name, **options: AtOnce()  # noqa: E731
        patch.setattr(offload.memory.tier_manager, "open_backend", at_once)
        patch.setattr(SaveGate, "admits", lambda gate, index: index in self._admitted)
        submit, need = UpdateQueue.submit, Fetcher.need

        def submit_one(
            queue: UpdateQueue, updates: Sequence[GroupUpdate], *, first: bool = False
        ) -> None:
            submit(queue, updates, first=first)
            for update in updates:
                if first or update.group.pending_update.step_waits:
                    self.make(queue, update.group.index)

        def need_updated(fetcher: Fetcher, item: Fetchable, *, backward: bool = False) -> None:
            if isinstance(fetcher.updates, UpdateQueue):
                self.make(fetcher.updates, item.index)
            need(fetcher, item, backward=backward)

        patch.setattr(UpdateQueue, "submit", submit_one)
        patch.setattr(Fetcher, "need", need_updated)

    def make(self, queue: UpdateQueue, index: int) -> None:
        update = queue._unfinished.get(index)
        if update is not None:
            self._admitted.add(index)
            queue._worker.wake()
            update.ready.wait()
            self._admitted.discard(index)

    def end(self, engine: Engine) -> None:
        assert engine._runtime is not None
        for index in list(engine._runtime.updates._waiting):
            self.make(engine._runtime.updates, index)


def drawn(seed: int) -> tuple[OffloadConfig, bool]:
    """A small model on nvme in part, with memory for some copies, and whether its steps clip."""
    draw = random.Random(seed)
    clips = draw.random() < 0.4

    def home() -> str:
        host = draw.choice((0, 0, 0, 30, 60, 100))
        return {0: "nvme", 100: "host"}.get(host, f"{{host: {host}%, nvme: {100 - host}%}}")

    passes, precision = draw.randint(1, 3), draw.choice(("fp32", "fp32", "bf16"))
    sums_on_host = passes > 1 and precision == "bf16"
    keys = [
        homes(home(), "host" if sums_on_host else home(), home()),
        f"train.model.layers={draw.randint(2, 6)}", f"train.model.hidden={draw.choice((64, 128))}",
        f"train.model.mlp={64 * draw.randint(1, 6)}",
        f"train.model.vocab={256 * draw.randint(1, 4)}",
        f"train.model.tied={draw.choice(('true', 'false'))}",
        f"optimizer.chunk={16384 * draw.randint(1, 6)}", f"prefetch={draw.randint(0, 6)}",
        f"gradient_accumulation_steps={passes}", f"precision={precision}",
        f"placement.activations.checkpoint={draw.choice(('false', 'false', 'true'))}",
    ]  # fmt: skip
    given = {**BASE, "clip_grad_norm": 1e-6 if clips else 1e9}
    share = draw.random()
    largest = 1 << 26
    low, high = 1 << 18, largest
    config = OffloadConfig.load(given, [*keys, f"budget.host={largest}"])
    hardware = Hardware(0, 1 << 34, 1 << 34, 1 << 36)
    while high - low > 1 << 14:  # the least budget
        middle = (low + high) // 2
        try:
            make_plan(
                OffloadConfig.load(given, [*keys, f"budget.host={middle}"]), shape_of(config),
                hardware,
            )  # fmt: skip
            high = middle
        except BudgetError:
            low = middle
    nvme = make_plan(config, shape_of(config), hardware).total(Tier.NVME)
    high += int(share**2 * nvme)
    return OffloadConfig.load(given, [*keys, f"budget.host={high}"]), clips


@pytest.mark.sample(30)
@pytest.mark.parametrize("seed", range(100))
def test_a_step_moves_the_predicted_bytes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first step on, until they repeat."""
    config, clips = drawn(seed)
    if clips:
        monkeypatch.setattr(planned_run, "speculative_groups", lambda plan, config: {})
    in_turn = OneAfterTheOther(monkeypatch)
    with offload.initialize(build_meta_model(config), config) as engine:
        experts = representatives(engine.plan, shape_of(config), WORK)
        passes = config.gradient_accumulation_steps
        said = planned_run.PlannedRun(engine.plan, engine.config, experts, passes).steps
        moved = train(engine, config, len(said))
        in_turn.end(engine)
    assert [(step.read, step.written) for step in said] == [
        (step.get("nvme read", 0), step.get("nvme write", 0)) for step in moved
    ]


def test_a_step_moves_the_predicted_bytes_behind_compute() -> None:
    """With threads, moves end when they end: what is kept may differ."""
    keys = homes("{device: 20%, host: 30%, nvme: 50%}", "nvme", "{host: 30%, nvme: 70%}")
    config = OffloadConfig.load(BASE, [keys, "budget.host=14MiB"])
    shape = shape_of(config)
    with offload.initialize(build_meta_model(config), config) as engine:
        moved = train(engine, config, 5, settle=True)
        workload = replace(WORK, passes=config.gradient_accumulation_steps)
        said = total_of(step_traffic(engine.plan, engine.config, shape, None, workload).moves)
    assert said.written == pytest.approx(moved[-1]["nvme write"], rel=0.1)
    states = sum(g.parameters + g.gradients + g.optimizer for g in engine.plan.groups)
    assert abs(said.read - moved[-1]["nvme read"]) <= 0.3 * states


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
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory stands in for the device's, as in `tests/offload/test_mirror.py`."""
    plan_for_a_gpu(monkeypatch)
    in_turn = OneAfterTheOther(monkeypatch)
    config = OffloadConfig.load(BASE, GPU_CASES[case])
    shape = shape_of(config)
    with offload.initialize(build_meta_model(config), config) as engine:
        moved = train(engine, config, 5)
        in_turn.end(engine)
        workload = replace(WORK, passes=config.gradient_accumulation_steps)
        said = total_of(step_traffic(engine.plan, engine.config, shape, None, workload).moves)
    assert (said.to_device, said.read, said.written) == tuple(
        moved[-1].get(link, 0) for link in ("host to device", "nvme read", "nvme write")
    )


# ---------------------------------------------------------------- the time
def step_of(*overrides: str, speeds: Speeds = SPEEDS, facts: ActivationFacts = FACTS,
            workload: Workload = WORK, gpu: int = 0) -> StepEstimate:  # fmt: skip
    config = OffloadConfig.load(BASE, ["budget.host=10MiB", *overrides])
    shape = shape_of(config)
    hardware = Hardware(gpu, 1 << 34, 1 << 34, 1 << 36)
    plan = make_plan(config, shape, hardware)
    resolved = resolved_config(config, plan, "cuda" if gpu else "cpu")
    return estimate_step(plan, resolved, shape, facts, workload, speeds)


def test_a_faster_link_never_makes_a_step_slower() -> None:
    before = step_of(ALL).seconds
    for name in (
        "nvme_read_bytes_per_s", "nvme_write_bytes_per_s", "host_bytes_per_s",
        "compute_bytes_per_s", "nvme_mixed_bytes_per_s",
    ):  # fmt: skip
        faster = replace(SPEEDS, **{name: 2 * getattr(SPEEDS, name)})
        assert step_of(ALL, speeds=faster).seconds <= before * 1.002, name


def test_each_call_of_the_optimizer_costs_its_time() -> None:
    dear = replace(SPEEDS, update_call_s=1.0)
    config = OffloadConfig.load(BASE)
    for chunk in (65536, 1 << 20):
        numels = [group.layout.shard_trainable for group in shape_of(config).groups]
        calls = sum(-(-numel // chunk) for numel in numels)
        keys = homes("host", "host", "host"), "budget.host=64MiB", f"optimizer.chunk={chunk}"
        steps = step_of(*keys), step_of(*keys, speeds=dear)
        cheap, full = ({link.name: link.seconds for link in each.links} for each in steps)
        assert full["optimizer"] - cheap["optimizer"] == pytest.approx(calls)
    keys = homes("device", "device", "device"), "budget.device=64MiB"
    device = step_of(*keys, speeds=dear, gpu=1 << 30)
    assert device.seconds < 1


def test_states_whose_arithmetic_is_slower_than_the_bus_take_its_time() -> None:
    def optimizer_s(rate: float) -> float:
        speeds = replace(SPEEDS, optimizer_parameters_per_s={"fp32": rate})
        step = step_of(homes("host", "host", "host"), "budget.host=64MiB", speeds=speeds)
        return next(link.seconds for link in step.links if link.name == "optimizer")

    assert optimizer_s(1e9) == pytest.approx(optimizer_s(0.5e9) / 2)
    assert optimizer_s(1e10) == optimizer_s(1e11)  # the bus


def test_chunks_in_memory_are_of_the_threads_and_of_what_buffers_may_take() -> None:
    alone = {threads: chunk_in_memory(threads) for threads in (1, 2, 16, 64)}
    assert alone == {1: 1 << 20, 2: 1 << 20, 16: 1 << 26, 64: 1 << 26}
    copied = {gib: chunk_in_memory(16, gib << 30) for gib in (0, 8, 24, 64)}
    assert copied == {0: 1 << 22, 8: 1 << 22, 24: 1 << 24, 64: 1 << 25}


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
