"""Speculative updates during backward: the bits of the deferred update, whatever the loop does."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.engine import Engine
from offload.planning.plan.plan import needed_nbytes
from offload.tiers.tier import Tier
from offload.zero.step.deferred_updates import SpeculationCounts
from tests.offload.engine_cases import plan_for_a_gpu

VOCABULARY, WORDS = 50, torch.arange(21).view(3, 7)
ON_HOST = {"parameters": "host", "gradients": "host", "optimizer": "host"}
ON_NVME = dict.fromkeys(ON_HOST, "nvme")
MIXED = {"host": "40%", "nvme": "60%"}
PLACEMENTS: tuple[dict[str, Any], ...] = (
    ON_NVME, {**ON_NVME, "gradients": "host"}, {**ON_HOST, "optimizer": "nvme"},
    {"parameters": MIXED, "gradients": "nvme", "optimizer": "nvme"},
    {"parameters": "nvme", "gradients": "host", "optimizer": MIXED},
)  # fmt: skip
# what a loop does between a backward and its step, or instead of that
ACTS = (
    "read", "norms", "eval", "scale", "clip", "lr", "drop", "write", "more", "keep", "schedule",
    "settle", "set", "steps",
)  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, drawn: random.Random) -> None:
        super().__init__()
        width = drawn.choice([48, 64])
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(drawn.choice([2, 3]))])
        self.head = nn.Linear(width, VOCABULARY)
        if drawn.random() < 0.4:
            self.head.weight = self.embed.weight
        if drawn.random() < 0.3:
            self.blocks[0].up.weight.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.roll(1, 1).flatten())


@contextmanager
def engine_of(seed: int, folder: Path, placement: dict[str, Any], **keys: Any) -> Iterator[Engine]:
    torch.manual_seed(seed)
    model = Model(random.Random(seed))
    config = {
        "placement": placement, "budget": {"host": "64MiB", "nvme": "256MiB"}, "seed": 1,
        "nvme": {"paths": [str(folder)]},
    }  # fmt: skip
    with offload.initialize(model, config | keys) as engine:
        yield engine


Program = list[tuple[int, list[str]]]  # of each step: backward passes, and acts after them


def run(engine: Engine, program: Program, *, force: bool) -> tuple[list[Any], dict[str, Tensor]]:
    """What the loop sees, and the values in the end. `force`: every step speculates."""
    model, optimizer, policy = engine.module, engine.optimizer, engine._runtime.stepper.policy
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    drawn, seen = torch.Generator().manual_seed(0), []
    for passes, acts in program:
        if force:
            policy.on, policy.passes = True, passes
        for _ in range(passes):
            words = torch.randint(VOCABULARY, (3, 7), generator=drawn)
            loss = loss_of(model, words)
            engine.backward(loss * float("inf") if "infinite" in acts else loss)
            seen.append(loss.item())
        if _between(engine, acts, words, seen):
            continue
        optimizer.step()
        seen += [optimizer.last_step.gradient_norm, optimizer.last_step.skipped]
        if "keep" not in acts:
            optimizer.zero_grad()
        if "schedule" in acts:
            schedule.step()
    engine.settle()
    return seen, {name: value.clone() for name, value in model.state_dict().items()}


def _between(engine: Engine, acts: list[str], words: Tensor, seen: list[Any]) -> bool:
    """True where there is no step."""
    model, optimizer = engine.module, engine.optimizer
    params = list(model.parameters())
    having = [param for param in params if param.grad is not None]
    if "read" in acts:
        seen.append([float(param.detach().float().sum()) for param in params])
    if "norms" in acts:
        seen.append([float(param.grad.norm()) for param in having])
    if "eval" in acts:
        with torch.no_grad():
            seen.append(float(model(words).sum()))
    if "scale" in acts:
        for param in having:
            param.grad.mul_(0.5)
    if "clip" in acts:
        seen.append(float(nn.utils.clip_grad_norm_(params, 0.3)))
    if "set" in acts:
        having[-1].grad = having[-1].grad.clone() * 2
    if "lr" in acts:
        optimizer.param_groups[0]["lr"] *= 0.9
    if "write" in acts:
        with torch.no_grad(), engine.gathered(model.head):
            model.head.bias.mul_(0.99)
    if "settle" in acts:
        engine.settle()
    if "steps" in acts:
        seen.append(
            [
                float(torch.as_tensor(each["step"]))
                for each in optimizer.state_dict()["state"].values()
            ]
        )
    if "drop" in acts:
        optimizer.zero_grad()
        return True
    if "more" in acts:
        engine.backward(model(words).float().square().mean())
    return False


def draw(seed: int) -> tuple[dict[str, Any], Program]:
    drawn = random.Random(seed)
    keys: dict[str, Any] = {"precision": drawn.choice(["fp32", "bf16"])}
    if drawn.random() < 0.7:
        keys["clip_grad_norm"] = drawn.choice([1e9, 0.5, 2.0])
    if drawn.random() < 0.4:
        keys["skip_nonfinite"] = True
    kind = drawn.choice(["adamw", "sgd", "lion"])
    keys["optimizer"] = {"type": kind, "lr": 1e-2, "chunk": drawn.choice([2048, 16384])}
    acts = [*ACTS, *(["infinite"] if "skip_nonfinite" in keys else [])]
    return keys, [
        (drawn.choice([1, 1, 1, 2]), [act for act in acts if drawn.random() < 0.06])
        for _ in range(8)
    ]


Seen = tuple[list[Any], dict[str, Any], dict[Any, Any]]


def trained(seed: int, folder: Path, placement: dict[str, Any], program: Program,
            *, force: bool, **keys: Any) -> tuple[Seen, SpeculationCounts]:  # fmt: skip
    """What the loop sees, the values and states in the end, and what became of the updates."""
    with engine_of(seed, folder, placement, **keys) as engine:
        seen, values = run(engine, program, force=force)
        engine.check_integrity()
        report = engine.report()
        assert report.tiers["host"].peak_nbytes <= report.tiers["host"].budget_nbytes
        return (seen, values, engine.optimizer.state_dict()["state"]), report.trials


def assert_equal_to_deferred(seed: int, folder: Path, keys: dict[str, Any], program: Program,
                             *, force: bool) -> SpeculationCounts:  # fmt: skip
    placement = PLACEMENTS[seed % len(PLACEMENTS)]
    got, counts = trained(seed, folder, placement, program, force=force, **keys)
    expected, deferred = trained(seed, folder, ON_HOST, program, force=False, **keys)
    assert not deferred.kept
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    return counts


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "program_seed" in metafunc.fixturenames:
        many = metafunc.config.getoption("--long")
        metafunc.parametrize("program_seed", range(120 if many else 5))


@pytest.mark.sample(2)
def test_drawn_loops_have_the_bits_of_deferred_updates(tmp_path: Path, program_seed: int) -> None:
    keys, program = draw(program_seed)
    assert_equal_to_deferred(program_seed, tmp_path, keys, program, force=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(len(PLACEMENTS)))
def test_a_loop_that_clips_nothing_is_updated_in_backward(tmp_path: Path, seed: int) -> None:
    keys = {"clip_grad_norm": 1e9, "precision": ["bf16", "fp32"][seed % 2]}
    program: Program = [(1, [])] * 6
    counts = assert_equal_to_deferred(seed, tmp_path, keys, program, force=False)
    assert counts.kept
    assert counts == SpeculationCounts(counts.kept)


def test_without_room_for_old_versions_updates_wait_for_the_step(tmp_path: Path) -> None:
    with engine_of(0, tmp_path, ON_NVME) as engine:
        needed = needed_nbytes(engine.plan, Tier.NVME)
    keys = {"budget": {"host": "64MiB", "nvme": needed + 4096}}
    counts = assert_equal_to_deferred(0, tmp_path, keys, [(1, [])] * 3, force=False)
    assert not counts.kept


def step(engine: Engine) -> None:
    engine.backward(loss_of(engine.module, WORDS))
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def _interrupted_settle(engine: Any, go_on: threading.Event) -> None:
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.4)  # not before, however slow the machine is
        go_on.set()

    threading.Timer(0.2, interrupt).start()
    engine.settle()


@pytest.mark.parametrize("placement", [ON_NVME, ON_HOST], ids=["nvme", "host beside a GPU"])
def test_an_interrupt_while_an_update_is_taken_back_changes_no_bit(
    tmp_path: Path, placement: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update is under way: Ctrl-C while a read of the old version waits for it."""
    if placement is ON_HOST:
        plan_for_a_gpu(monkeypatch)
    keys: dict[str, Any] = {"optimizer": {"chunk": 16384}}
    keys["budget"] = {"device": "1MiB", "host": "64MiB", "nvme": "256MiB"}
    states: list[Any] = []
    for interrupted in False, True:
        with engine_of(1, tmp_path, placement, **keys) as engine:
            for _ in range(8):
                step(engine)
            policy, updates = engine._runtime.stepper.policy, engine._runtime.updates
            go_on, step_here = threading.Event(), updates._step_here

            def late(chunk: Any, go_on: Any = go_on, real: Any = step_here) -> Any:
                go_on.wait(30)
                return real(chunk)

            engine.settle()
            updates._step_here = late  # type: ignore[method-assign]
            engine.backward(loss_of(engine.module, WORDS))
            assert policy._terms
            if interrupted:
                with pytest.raises(KeyboardInterrupt):
                    _interrupted_settle(engine, go_on)
            go_on.set()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            engine.settle()
            states.append({n: value.clone() for n, value in engine.module.state_dict().items()})
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_why_a_speculative_update_failed_is_what_is_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = offload.initialize(
        Model(random.Random(1)), {"placement": ON_NVME, "nvme": {"paths": [str(tmp_path)]}}
    )
    step(engine)
    engine.settle()

    updates, go_on = engine._runtime.updates, threading.Event()

    def fails(chunk: Any) -> None:
        go_on.wait(30)
        raise OSError("the disk is gone")

    updates._step_here = fails  # type: ignore[method-assign]
    engine.backward(loss_of(engine.module, WORDS))
    assert updates._waiting
    go_on.set()
    updates._worker._thread.join(30)
    assert updates._worker.failure is not None
    with pytest.raises(OSError, match="the disk is gone"):
        engine.settle()
    engine.close()
    assert "went with the tiers: the disk is gone" in caplog.text


def test_without_memory_for_old_weights_updates_wait_for_the_step(tmp_path: Path) -> None:
    homes = {**ON_HOST, "optimizer": "nvme"}
    with engine_of(0, tmp_path, homes) as engine:
        needed = needed_nbytes(engine.plan, Tier.HOST)
    with engine_of(0, tmp_path, homes, budget={"host": needed, "nvme": "256MiB"}) as engine:
        for _ in range(3):
            step(engine)
        counts = engine.report().trials
        weights = sum(group.state.nbytes for group in engine.store.groups)
        assert counts.kept < 3 * len(engine.store.groups)
        assert needed - weights < engine.report().tiers["host"].peak_nbytes <= needed


def test_where_the_disk_has_become_full_nothing_is_speculative(tmp_path: Path) -> None:
    with engine_of(1, tmp_path, ON_NVME) as engine:
        engine._runtime.stepper.policy.free_nbytes = lambda: 4096
        for _ in range(3):
            step(engine)
        assert not engine.report().trials.kept
