"""The kind of accelerator, over a module that stands in for the one that PyTorch has for it.

None of its devices is there where these tests run: what the kind asks PyTorch for is tested, not
what PyTorch makes of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from offload.config import OffloadConfig
from offload.errors import ConfigError
from offload.memory.tier_manager import compute_device
from offload.swap.device.streams import CopyStream
from offload.tiers.accelerator import KINDS, Accelerator
from offload.tiers.memory import HostMemory
from offload.tiers.pinning import EXTENT_NBYTES


class Device(NamedTuple):
    """A device of the kind, with or without one in this machine."""

    type: str
    index: int = 0


class FakeStream:
    def __init__(self, module: FakeModule, name: str) -> None:
        self.module, self.name = module, name

    def wait_event(self, event: FakeEvent) -> None:
        self.module.calls.append(f"{self.name} waits for {event.recorded}")

    def synchronize(self) -> None:
        self.module.calls.append(f"synchronize {self.name}")

    def __enter__(self) -> None:
        self.module.calls.append(f"enter {self.name}")

    def __exit__(self, *_: object) -> None:
        self.module.calls.append(f"leave {self.name}")


class FakeEvent:
    def __init__(self, module: FakeModule) -> None:
        self.module, self.recorded = module, ""

    def record(self, stream: FakeStream) -> None:
        self.recorded = stream.name
        self.module.calls.append(f"record {stream.name}")


class FakeModule:
    """As `torch.cuda` is for CUDA. The driver keeps `last_error` until it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.device_index, self.devices, self.available = 0, 2, True
        self.status = self.last_error = 0

    def is_available(self) -> bool:
        return self.available

    def device_count(self) -> int:
        return self.devices

    def current_device(self) -> int:
        return self.device_index

    def set_device(self, index: int) -> None:
        self.device_index = index

    @contextmanager
    def device(self, device: Device) -> Iterator[None]:
        self.calls.append(f"on {device.index}")
        yield

    def synchronize(self, device: Device) -> None:
        self.calls.append(f"synchronize device {device.index}")

    def Stream(self, device: Device) -> FakeStream:
        return FakeStream(self, "side")

    def current_stream(self, device: Device) -> FakeStream:
        return FakeStream(self, "model")

    def stream(self, stream: FakeStream) -> FakeStream:
        return stream

    def Event(self, *_: Device, **options: bool) -> FakeEvent:
        return FakeEvent(self)

    def cudart(self) -> FakeModule:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.last_error = self.status
        return self.status

    def cudaHostUnregister(self, address: int) -> None:
        self.calls.append("unregister")

    def kernel(self) -> None:
        """After a kernel PyTorch asks for the last error, which forgets it, and raises it."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    fake = FakeModule()
    monkeypatch.setattr(Accelerator, "_module", property(lambda kind: fake))
    return fake


# ---------------------------------------------------------------- streams
def test_a_copy_waits_for_the_model_and_is_marked_in_its_own_stream(module: FakeModule) -> None:
    device: Any = Device("cuda")
    source, there = torch.arange(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    mark = CopyStream(device).copy(there, source)
    assert mark.event is not None
    assert there.tolist() == source.tolist()
    assert module.calls == [
        "record model", "side waits for model", "enter side", "leave side", "record side",
    ]  # fmt: skip
    mark.before_compute()
    assert module.calls[-1] == "model waits for side"


# ---------------------------------------------------------------- pinning
def test_a_failed_pinning_leaves_no_error_to_the_next_kernel(
    module: FakeModule, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blamed: list[Any] = []

    class Filled:
        def fill_(self, value: float) -> None:
            module.kernel()

    def empty(numel: int, *, device: Any) -> Filled:
        blamed.append(device)
        return Filled()

    monkeypatch.setattr(torch, "empty", empty)
    device: Any = Device("cuda", 1)
    module.status = 2
    with caplog.at_level(logging.WARNING, "offload"):
        memory = HostMemory(1 << 20, pin_for=device)
        memory.tensor(0, 16)
    module.kernel()  # raises if the error were left
    assert not memory.pinned
    assert blamed == [device]
    (line,) = caplog.messages
    # how much at once depends on where the region begins in huge pages
    assert "iB could not be pinned (cudaHostRegister's error 2), 0 B are" in line
    memory.close()
    assert "unregister" not in module.calls
    assert memory.tensor(0, 16).sum() == 0


def test_pinned_memory_is_given_back_when_its_device_has_done_everything(
    module: FakeModule,
) -> None:
    device: Any = Device("cuda", 1)
    memory = HostMemory(1 << 20, pin_for=device)
    memory.tensor(0, 16)
    assert memory.pinned
    module.calls.clear()
    memory.close()
    assert module.calls == ["on 1", "synchronize device 1", "unregister"]
    assert not memory.pinned


def test_memory_is_unpinned_also_where_the_device_has_failed(
    module: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    device: Any = Device("cuda", 1)
    memory = HostMemory(2 * EXTENT_NBYTES, pin_for=device)
    memory.tensor(0, 2 * EXTENT_NBYTES)

    def failed(device: Device) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(module, "synchronize", failed)
    with pytest.raises(RuntimeError, match="illegal"):
        memory.close()
    assert module.calls.count("unregister") >= 2


# ---------------------------------------------------------------- which one
def test_the_kind_that_is_there_is_the_default(
    module: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "device", Device)
    for asked in ("auto", "cuda"):
        assert compute_device(OffloadConfig(device=asked)) == Device("cuda", 0)
    module.available = False
    assert compute_device(OffloadConfig(device="auto")) == Device("cpu")
    with pytest.raises(ConfigError, match="device: cuda, but this PyTorch sees no"):
        compute_device(OffloadConfig(device="cuda"))


@pytest.mark.parametrize(
    ("current", "local_rank", "expected"),
    [(0, "1", 1), (0, "0", 0), (0, "2", 0), (1, "0", 1), (3, "1", 3)],
)
def test_a_rank_has_its_own_device_unless_one_was_chosen(
    module: FakeModule, monkeypatch: pytest.MonkeyPatch, current: int, local_rank: str,
    expected: int,
) -> None:  # fmt: skip
    module.device_index = current
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert KINDS["cuda"].current_device() == torch.device("cuda", expected)
