"""`report()`: for what the thread that trains has waited; what is in memory is not read again, and
what is used up is never written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.memory import tier_manager
from offload.swap.io.threads_backend import ThreadsBackend
from offload.swap.threads.lanes import Lane, WaitFor
from tests.offload.engine_cases import NVME, TinyLM, batches, config, on_a_gpu_too, seeded
from tests.offload.engine_states import losses_of, train_step
from tests.offload.plain_training import MakeEngine

SLOW_S = 0.05


@pytest.fixture
def slow_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(call: Callable[..., int]) -> Callable[..., int]:
        def later(fd: int, buffers: Any, offset: int) -> int:
            time.sleep(SLOW_S)
            return call(fd, buffers, offset)

        return later

    def backend(*_: Any, **__: Any) -> ThreadsBackend:
        return ThreadsBackend(preadv=slow(os.preadv), pwritev=slow(os.pwritev))

    monkeypatch.setattr(tier_manager, "open_backend", backend)


def train(engine: Any, steps: int = 2) -> tuple[dict[str, float], float]:
    """The waits of some steps, and how long these took."""
    before, began = engine.report().waits, time.perf_counter()
    for tokens in batches(steps):
        train_step(engine.optimizer, engine.module.loss(tokens))
    engine.module.loss(tokens)  # of the last update, too
    seconds, now = time.perf_counter() - began, engine.report().waits
    return {name: now[name] - before[name] for name in now}, seconds


def test_slow_files_are_waited_for_and_updates_apart(make: MakeEngine, slow_files: None) -> None:
    engine = make(seeded(TinyLM), NVME, budget={"host": "1MiB", "nvme": "64MiB"}, prefetch=1)
    waits, seconds = train(engine)
    assert waits["update"] > 0  # an update ends with its writes: a wait for it is not one for nvme
    assert waits["link"] == waits["ranks"] == 0.0
    assert sum(waits.values()) <= seconds


def test_the_profiler_shows_phases_by_name(make: MakeEngine) -> None:
    engine = make(seeded(TinyLM), NVME, budget={"host": "1MiB", "nvme": "64MiB"})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(engine, 1)
        with Lane(WaitFor.UPDATE).waiting():
            pass
    names = {event.key for event in profile.key_averages()}
    assert {
        "offload: gather blocks.0", "offload: reduce blocks.0", "offload: wait for update",
    } <= names  # fmt: skip


def trained(folder: Path, **keys: Any) -> offload.engine.Report:
    keys = {"optimizer": {"chunk": 2048}, **keys}
    model = seeded(lambda: TinyLM(blocks=12))
    with offload.initialize(model, config(folder, NVME, **keys)) as engine:
        losses_of(engine, batches(4))
        engine.settle()
        return engine.report()


@on_a_gpu_too
def test_with_room_for_everything_nothing_is_read_back(tmp_path: Path) -> None:
    assert trained(tmp_path).bytes_moved["nvme read"] == 0


@on_a_gpu_too
@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, {"in_backward": True}], ids=["behind it", "in backward"])
def test_gradients_that_find_room_until_they_are_used_up_are_never_written(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    report = trained(tmp_path, optimizer={"chunk": 2048, **keys})
    assert report.tiers["nvme"].peak_by_class.get("gradients", 0) == 0
