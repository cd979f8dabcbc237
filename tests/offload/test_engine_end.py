"""What is left of an engine that was closed or dropped, or that could not be made."""

from __future__ import annotations

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
import offload.engine
import offload.memory.tier_manager
import offload.optimizers.optimizer
import offload.tiered_model
import offload.zero.step.runtime
from offload.errors import StateError
from offload.swap.io.requests_and_retries import Operation
from offload.tiers.memory import HostMemory
from tests.aio import IO_BACKENDS
from tests.offload.engine_cases import (
    HOST,
    MARKS,
    NVME,
    ON,
    WIDTH,
    TinyLM,
    batches,
    config,
    on_the_cpu_alone,
    plan_for_a_gpu,
    seeded,
)
from tests.offload.engine_states import losses_of
from tests.offload.plain_training import EVERYWHERE, MakeEngine, floats, square_loss, tokens_loss
from tests.swap.stream_simulation import CUDA, World

pytestmark = MARKS


# ----------------------------------------------------------------------- the end
@pytest.mark.parametrize("placement", EVERYWHERE)
def test_use_after_close_is_an_error_and_the_model_stays_without_values(
    make: MakeEngine, placement: Any
) -> None:
    model = seeded(TinyLM)
    engine = make(model, placement)
    losses_of(engine, batches(1))
    optimizer = engine.optimizer
    engine.close("drop")
    engine.close()
    with pytest.raises(StateError, match="closed"), engine.gathered():
        pass
    for call in (
        optimizer.step, optimizer.zero_grad, optimizer.state_dict, engine.report, engine.settle,
        model.state_dict, lambda: tokens_loss(model, batches(1)[0]),
    ):  # fmt: skip
        with pytest.raises(StateError, match="closed"):
            call()
    for _ in range(2):
        with pytest.raises(StateError, match=r"was in tiers before.*build it anew"):
            make(model, placement)
        with pytest.raises(StateError, match="engine is closed"):
            tokens_loss(model, batches(1)[0])


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


class Broken(Exception):
    pass


def broken(*args: Any, **keys: Any) -> Any:
    raise Broken


# ------------------------------------------------------------------- beside a device
# Memory is given back when every stream has done its work. Host memory stands in for the device's,
# and is not pinned: nothing else waits for the device.
@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Plans are those of a machine with a GPU of 1 GiB, without Triton."""
    world = World(monkeypatch, eager_model=True)
    monkeypatch.setattr(offload.memory.tier_manager, "DeviceHomes", world.device_homes)
    plan_for_a_gpu(monkeypatch, kernels_missing="the test says so")
    return world


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch, world: World) -> list[bool]:
    """For each memory that is given back: whether all streams were done."""
    real, idle = HostMemory.close, list[bool]()

    def close(memory: HostMemory) -> None:
        idle.append(all(stream.idle for stream in world.streams))
        real(memory)

    monkeypatch.setattr(HostMemory, "close", close)
    return idle


@on_the_cpu_alone("host memory stands in for the device's")
def test_memory_is_given_back_when_every_stream_has_done_its_work(
    tmp_path: Path, world: World, given_back: list[bool]
) -> None:
    budget = {"device": "2MiB", "host": "16MiB", "nvme": "64MiB"}
    engine = offload.initialize(seeded(TinyLM), config(tmp_path, HOST, budget=budget))
    losses_of(engine, batches(1))
    # a kernel on a stream that the engine does not know, and copies on all others
    for stream in (world.stream(CUDA), *world.streams):
        stream.put(lambda: None)
    engine.close()
    assert given_back == [True, True], "the memories of the device and of the host"


@on_the_cpu_alone("host memory stands in for the device's")
@pytest.mark.parametrize("what", ["SlotPool", "DeviceHomes", "ActivationTier"])
def test_memory_is_given_back_where_the_devices_part_cannot_be_opened(
    tmp_path: Path, world: World, given_back: list[bool], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(offload.memory.tier_manager, what, broken)
    keys = config(tmp_path, {**HOST, "activations": {"tier": "host"}})
    with pytest.raises(Broken):
        offload.initialize(seeded(TinyLM), keys)
    assert given_back == [True, True]


# ------------------------------------------------------------------- `initialize` that fails
KEYS: dict[str, Any] = {
    "placement": {
        "parameters": "nvme", "gradients": "host", "optimizer": "nvme",
        "activations": {"tier": "nvme"},
    },
    "budget": {"host": "32MiB", "nvme": "64MiB"},
}  # fmt: skip
BEFORE_WEIGHTS_LEAVE = {
    "the backend": (offload.memory.tier_manager, "open_backend"),
    "the store of blocks": (offload.memory.tier_manager, "BlockStore"),
    "the tier of activations": (offload.memory.tier_manager, "ActivationTier"),
    "the update buffers": (offload.memory.tier_manager.TierManager, "staging"),
    "the update queue": (offload.zero.step.runtime, "UpdateQueue"),
    "the stepper": (offload.zero.step.runtime, "Stepper"),
    "gradient handles": (offload.zero.step.runtime, "GradientHandles"),
}
AFTER = {
    "the first values": (offload.engine, "load_group"),
    "the optimizer": (offload.engine, "optimizer_class"),
    "saved activations": (offload.engine, "handle_activations"),
    "the hooks": (offload.zero.step.runtime.Runtime, "start"),
    "the refusal of wrappers": (offload.engine, "refuse_foreign_wrappers"),
}


def held() -> tuple[int, int, int]:
    """Open files, threads, and hooks on every optimizer."""
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    return files, threading.active_count(), len(offload.optimizers.optimizer._watched)


def fail(model: Any, keys: Any, owner: object, name: str, patch: pytest.MonkeyPatch) -> None:
    before = held()
    with patch.context() as patched:
        patched.setattr(owner, name, broken)
        with pytest.raises(Broken):
            offload.initialize(model, keys)
    # an engine that an earlier test dropped may have ended meanwhile
    assert all(now <= then for now, then in zip(held(), before, strict=True))


@pytest.mark.sample(3)
@pytest.mark.parametrize("what", BEFORE_WEIGHTS_LEAVE)
def test_the_model_is_as_it_was(tmp_path: Path, monkeypatch: Any, what: str) -> None:
    model, keys = seeded(TinyLM).to(ON), config(tmp_path, **KEYS)
    fail(model, keys, *BEFORE_WEIGHTS_LEAVE[what], monkeypatch)
    loss = model.loss(batches(1)[0]).item()
    with offload.initialize(model, keys):
        assert model.loss(batches(1)[0]).item() == loss


@pytest.mark.sample(3)
@pytest.mark.parametrize("what", AFTER)
def test_the_model_is_closed(tmp_path: Path, monkeypatch: Any, what: str) -> None:
    model, keys = seeded(TinyLM).to(ON), config(tmp_path, **KEYS)
    fail(model, keys, *AFTER[what], monkeypatch)
    with pytest.raises(StateError, match="closed"):
        model.loss(batches(1)[0])
    with pytest.raises(StateError, match="build it anew"):
        offload.initialize(model, keys)
