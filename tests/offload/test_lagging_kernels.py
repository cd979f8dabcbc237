"""Training on a GPU that does everything in the worst order that its streams allow, with memory
that is just enough: the bits of an all-host run.

Kernels are as late as they may be, copies as early: the opposite of `test_gpu`'s simulation, where
copies are late and the model never is. Both stand in for a GPU, and its memory is host memory.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import offload
import offload.memory.tier_manager
from offload.errors import BudgetError
from offload.swap.activations import activations
from offload.swap.device import device_home, outbox
from offload.swap.device.fences import Fences, OpenReads
from offload.swap.device.streams import CopyMark, CopyStream
from offload.tiers.tier import Tier
from offload.tiers.units import parse_bytes
from tests.kernels import triton_device
from tests.kernels.triton_device import launches
from tests.offload import test_gpu
from tests.offload.engine_cases import HOST, batches, config, losses_of, seeded
from tests.offload.test_gpu import ON_GPU, SPLIT, STEPS, Run, assert_same, device, interpreter
from tests.swap.lagging_model import lagging
from tests.swap.stream_simulation import World

__all__ = ["device", "interpreter", "launches"]
pytestmark = [*triton_device.MARKS, pytest.mark.skipif(ON_GPU, reason="there the streams are real")]

LARGE = "2MiB"
SPARE = 8 << 10  # beside what the device needs at least
ALL_ON_DEVICE = {"parameters": "device", "gradients": "device", "optimizer": "device"}
CASES: list[tuple[dict[str, Any], bool]] = [  # and whether updates run in backward
    ({}, False),
    ({"parameters": "nvme", "gradients": "nvme", "optimizer": SPLIT}, True),
    ({"parameters": SPLIT, "gradients": SPLIT, "optimizer": SPLIT}, False),
    ({"gradients": "device", "optimizer": SPLIT}, True),
    ({"parameters": "device", "optimizer": "device"}, False),
    (ALL_ON_DEVICE, False),
    ({"activations": {"tier": "host"}}, False),
    ({"activations": {"tier": "nvme", "checkpoint": True}}, True),
]


class Net(test_gpu.Net):
    """More blocks than fit in the device's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(test_gpu.Block() for _ in range(4))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch, eager_model=False, eager_copies=True)


@pytest.fixture(autouse=True)
def small_activations_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST_NBYTES", 256)


def keys_of(
    folder: Path, placement: dict[str, Any], in_backward: bool, room: str
) -> dict[str, Any]:
    return config(
        folder, {**HOST, **placement}, precision="bf16", device="cpu",
        optimizer={"chunk": 2048, "lr": 3e-3, "in_backward": in_backward},
        budget={"device": room, "host": "16MiB", "nvme": "64MiB"},
    )  # fmt: skip


def just_enough(keys: Callable[[str], dict[str, Any]]) -> str:
    """Of the device's memory."""
    with pytest.raises(BudgetError) as refusal:
        offload.initialize(seeded(Net), keys("4KiB"))
    (needed,) = re.findall(r"of the ([\d.]+ KiB) needed", str(refusal.value))
    return str(parse_bytes(needed.replace(" ", "")) + SPARE)


def values_of(engine: offload.Engine) -> dict[str, Tensor]:
    """Parameters and states by name, one parameter after another."""
    found = {}
    for name, param in engine.module.named_parameters():
        states = engine.values.read_state(param)
        found.update({f"{name} {key}": value.clone() for key, value in states.items()})
        found[name] = engine.values.full(param)
    return found


@functools.cache
def on_host(folder: Path, in_backward: bool) -> Run:
    with test_gpu.no_kernels():
        engine = offload.initialize(seeded(Net), keys_of(folder, {}, in_backward, LARGE))
        with engine:
            losses = losses_of(engine, batches(STEPS))
            return losses, values_of(engine), engine.report()


def on_lagging_device(
    folder: Path, placement: dict[str, Any], in_backward: bool, world: World,
    patch: pytest.MonkeyPatch,
) -> Run:  # fmt: skip
    patch.setattr(offload.memory.tier_manager, "DeviceHomes", world.device_homes)
    keys = functools.partial(keys_of, folder, placement, in_backward)
    with offload.initialize(seeded(Net), keys(just_enough(keys))) as engine:
        tier = engine._homes._memory[Tier.DEVICE]
        memory = tier._memory.tensor(0, tier.account.budget_nbytes)
        with lagging(world, memory, patch) as lag:
            losses = losses_of(engine, batches(STEPS))
        assert lag.queued > 50 * STEPS
        return losses, values_of(engine), engine.report()


@pytest.mark.sample(3)
@pytest.mark.parametrize(("placement", "in_backward"), CASES, ids=str)
def test_kernels_that_are_late_and_copies_that_are_early_change_no_bit(
    tmp_path, device, monkeypatch, world, placement, in_backward, long
):
    if not long and (placement, in_backward) in (CASES[2], CASES[4]):
        pytest.skip("as others, in parts: --long")
    found = on_lagging_device(tmp_path, placement, in_backward, world, monkeypatch)
    assert_same(found, on_host(tmp_path.parent, in_backward))


def without_fences(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fences, "claim", lambda self, extent: ())


def without_readers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OpenReads, "mark", lambda self: None)
    patch.setattr(OpenReads, "mark_now", lambda self, reader: None)


def without_the_model(patch: pytest.MonkeyPatch) -> None:
    real = CopyStream.copy
    patch.setattr(
        CopyStream, "copy", lambda self, to, of, after=(): real(self, to, of, after)
    )  # fmt: skip
    patch.setattr(outbox, "mark_of", lambda stream, device: CopyMark())


@pytest.mark.sample(3)
@pytest.mark.parametrize("forget", [without_fences, without_readers, without_the_model])
def test_copies_that_do_not_wait_are_seen(tmp_path, device, monkeypatch, world, forget):
    placement, in_backward = CASES[0]
    forget(monkeypatch)
    found = on_lagging_device(tmp_path, placement, in_backward, world, monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(found, on_host(tmp_path.parent, in_backward))


def test_an_update_that_does_not_wait_is_seen(tmp_path, device, monkeypatch, world):
    monkeypatch.setattr(device_home.DeviceHomeState, "used_device_piece", lambda *_: None)
    found = on_lagging_device(tmp_path, ALL_ON_DEVICE, False, world, monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(found, on_host(tmp_path.parent, False))
