"""The end of an engine with a device: memory is given back when every stream has done its work.

Host memory stands in for the device's, and is not pinned: nothing else waits for the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import offload
import offload.memory.tier_manager
import offload.tiered_model
from offload.tiers.memory import HostMemory
from tests.offload.engine_cases import (
    HOST,
    TinyLM,
    batches,
    config,
    losses_of,
    plan_for_a_gpu,
    seeded,
)
from tests.swap.stream_simulation import CUDA, World

MEMORIES = 2  # of the device and of the host


class Broken(Exception):
    pass


def broken(*args: Any, **keys: Any) -> Any:
    raise Broken


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


def trained(folder: Path) -> offload.Engine:
    """An engine amid training."""
    budget = {"device": "2MiB", "host": "16MiB", "nvme": "64MiB"}
    engine = offload.initialize(seeded(TinyLM), config(folder, HOST, budget=budget))
    losses_of(engine, batches(1))
    return engine


def give_work(world: World) -> None:
    """A kernel on a stream that the engine does not know, and copies on all others."""
    for stream in (world.stream(CUDA), *world.streams):
        stream.put(lambda: None)


def test_memory_is_given_back_when_every_stream_has_done_its_work(
    tmp_path: Path, world: World, given_back: list[bool]
) -> None:
    engine = trained(tmp_path)
    give_work(world)
    engine.close()
    assert given_back == [True] * MEMORIES


@pytest.mark.parametrize("what", ["SlotPool", "DeviceHomes", "ActivationTier"])
def test_memory_is_given_back_where_the_devices_part_cannot_be_opened(
    tmp_path: Path, world: World, given_back: list[bool], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(offload.memory.tier_manager, what, broken)
    keys = config(tmp_path, {**HOST, "activations": {"tier": "host"}})
    with pytest.raises(Broken):
        offload.initialize(seeded(TinyLM), keys)
    assert given_back == [True] * MEMORIES
