"""What is left of an engine that was closed or dropped, and two engines at once.

Most compare with plain PyTorch. Parameters, gradients and optimizer states are on nvme unless a
test says otherwise.
"""

import gc
import mmap
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import nn

import offload
from offload.errors import StateError
from offload.swap.io.requests_and_retries import Operation
from tests.aio import IO_BACKENDS
from tests.offload.engine_cases import (
    HOST,
    MARKS,
    NVME,
    WIDTH,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    losses_of,
    seeded,
    states_of,
)
from tests.offload.plain_training import EVERYWHERE, MakeEngine, floats, square_loss, tokens_loss

pytestmark = MARKS


# ----------------------------------------------------------------------- the end
def test_use_after_close_is_an_error(make: MakeEngine) -> None:
    for placement in (NVME, HOST):
        engine = make(seeded(TinyLM), placement)
        losses_of(engine, batches(1))
        optimizer = engine.optimizer
        engine.close("drop")
        engine.close()
        with pytest.raises(StateError, match="closed"), engine.gathered():
            pass
        for call in (
            optimizer.step, optimizer.zero_grad, optimizer.state_dict, engine.report, engine.settle,
            engine.module.state_dict, lambda e=engine: tokens_loss(e.module, batches(1)[0]),
        ):  # fmt: skip
            with pytest.raises(StateError, match="closed"):
                call()


@pytest.mark.parametrize("placement", EVERYWHERE)
def test_a_closed_engines_model_stays_without_values(make: MakeEngine, placement: Any) -> None:
    model = seeded(TinyLM)
    make(model, placement).close("drop")
    for _ in range(2):
        with pytest.raises(StateError, match=r"was in tiers before.*build it anew"):
            make(model, placement)
        with pytest.raises(StateError, match="engine is closed"):
            tokens_loss(model, batches(1)[0])
        with pytest.raises(StateError, match="engine is closed"):
            model.state_dict()


@pytest.mark.parametrize("placement", EVERYWHERE)
def test_two_open_engines_cannot_have_one_parameter(make: MakeEngine, placement: Any) -> None:
    def build() -> Any:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    model: Any = seeded(build)
    other: Any = seeded(build)
    model[1].bias.requires_grad_(False)
    other[1].weight = model[0].weight
    frozen: Any = nn.Linear(WIDTH, WIDTH)
    frozen.bias = model[1].bias
    before = [p.detach().clone() for p in other.parameters()]
    engine = make(model, placement)
    alone: Any = seeded(build)
    alone[1].bias.requires_grad_(False)
    expected = losses_of(make(alone, placement), floats(3), loss_of=square_loss)
    for shared, name in (
        (model, r"0\.weight"), (model[0], "weight"), (nn.Sequential(model), r"0\.0\.weight"),
        (other, r"1\.weight"),
    ):  # fmt: skip
        with pytest.raises(StateError, match=rf"^{name} trains through another engine"):
            make(shared, placement)
    if placement is NVME:
        with pytest.raises(StateError, match=r"^bias trains through another engine"):
            make(frozen, placement)
    assert losses_of(engine, floats(3), loss_of=square_loss) == expected
    other[1].weight = nn.Parameter(before[2])
    assert losses_of(make(other, placement), floats(3), loss_of=square_loss)


def open_files() -> set[str]:
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue  # the listing's own
    return {link for link in links if "/fd" not in link.split(" ", 1)[1]}


def offload_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("offload")}


def wait_until_closed(folder: Path) -> None:
    """A thread of its own closes a dropped engine, after an update that is under way."""
    until = time.monotonic() + 30
    while (offload_threads() or swap_files(folder)) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert not offload_threads()
    assert not swap_files(folder)


def swap_files(folder: Path) -> list[str]:
    return [link for link in open_files() if link.endswith("(deleted)") and str(folder) in link]


@pytest.mark.parametrize("backend", IO_BACKENDS)
def test_nothing_is_left_after_close(tmp_path: Path, backend: str) -> None:
    process = psutil.Process()
    keys = config(tmp_path, nvme={"paths": [str(tmp_path)], "backend": backend})
    with offload.initialize(seeded(TinyLM), keys) as engine:  # the first leaves torch's own threads
        losses_of(engine, batches(1))
    assert not offload_threads()
    files, threads = open_files(), process.num_threads()
    for _ in range(3):
        with offload.initialize(seeded(TinyLM), keys) as engine:
            losses_of(engine, batches(1))
            assert offload_threads()
    del engine
    gc.collect()
    assert open_files() == files
    assert process.num_threads() <= threads
    assert not offload_threads()
    assert list(tmp_path.iterdir()) == []


def test_an_engine_dropped_without_close_leaves_nothing_behind(tmp_path: Path) -> None:
    import torch.distributed.pipelining  # noqa: F401 - who has it is looked at for its schedules

    gc.collect()
    files = open_files()
    engine = offload.initialize(seeded(TinyLM), config(tmp_path))
    losses_of(engine, batches(2))
    del engine
    gc.collect()
    wait_until_closed(tmp_path)
    assert open_files() == files
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("thread", ["update", "io"])
def test_an_engine_that_is_collected_on_a_thread_of_its_own_is_closed(
    tmp_path: Path, thread: str
) -> None:
    gc.collect()
    engine = offload.initialize(seeded(TinyLM), config(tmp_path, groups={"blocks": ["Block"]}))
    losses_of(engine, batches(2))
    engine.settle()  # an update that is under way would keep it
    gone, store, updates = weakref.ref(engine), engine._tier_manager.store, engine._runtime.updates
    assert store is not None
    collected = threading.Event()

    def collect() -> None:
        gc.collect()  # what closes the engine may wait neither for this request nor for this update
        collected.set()

    gc.disable()
    try:
        del engine
        page, path = memoryview(mmap.mmap(-1, 4096)), store.files[0]
        if thread == "io":
            store.backend.submit(Operation.READ, path.fd, page, 0, path=path.path, after=collect)
        else:
            updates._worker._work = lambda: collect() is not None
            updates._worker.wake()
        assert collected.wait(30)
        assert gone() is None
        wait_until_closed(tmp_path)
    finally:
        gc.enable()


def test_two_engines_at_once_do_not_disturb_each_other(make: MakeEngine) -> None:
    alone = []
    for seed in (0, 1):
        engine = make(seeded(TinyLM, seed))
        losses_of(engine, batches(3, seed))
        alone.append(states_of(engine))
    first, second = make(seeded(TinyLM, 0)), make(seeded(TinyLM, 1))
    for a, b in zip(batches(3, 0), batches(3, 1), strict=True):
        losses = tokens_loss(first.module, a), tokens_loss(second.module, b)
        for loss in reversed(losses):
            loss.backward()
        for engine in (first, second):
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    assert_same_bits(states_of(first), alone[0])
    assert_same_bits(states_of(second), alone[1])
