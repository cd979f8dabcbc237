"""Host memory is pinned as it is first used, and no copy crosses from one extent into another."""

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.swap.device.streams import CopyStream
from offload.tiers import accelerator, pinning
from offload.tiers.accelerator import Accelerator
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import MemoryTier
from offload.tiers.tier import Tier

KIB, EXTENT = 1 << 10, 64 << 10
NBYTES = 10 * EXTENT


class Driver(Accelerator):
    """Keeps what is registered; refuses what overlaps, and everything beyond `max_nbytes`."""

    def __init__(self) -> None:
        super().__init__("cuda", "CUDA")
        self.registered: dict[int, int] = {}
        self.max_nbytes, self.refused = 1 << 60, 0

    def register(self, address: int, nbytes: int, device: torch.device) -> str | None:
        for start, size in self.registered.items():
            assert address + nbytes <= start or start + size <= address, "registered twice"
        if sum(self.registered.values()) + nbytes > self.max_nbytes:
            self.refused += 1
            return "there is no more"
        self.registered[address] = nbytes
        return None

    def unregister(self, address: int, device: torch.device) -> None:
        del self.registered[address]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether every byte of it is registered."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.numel()
        held = sum(
            max(0, min(stop, address + size) - max(start, address))
            for address, size in self.registered.items()
        )
        return held == stop - start

    def holds_in_one(self, tensor: torch.Tensor) -> bool:
        """Whether a copy may be one to the driver: in one registered range, or in none at all."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.numel()
        ends = [(address, address + size) for address, size in self.registered.items()]
        touched = [(a, b) for a, b in ends if a < stop and start < b]
        return not touched or (touched[0][0] <= start and stop <= touched[0][1])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(accelerator, "KINDS", {"cuda": driver})
    monkeypatch.setattr(pinning, "EXTENT_NBYTES", EXTENT)
    return driver


def pinned_memory(nbytes: int = NBYTES) -> HostMemory:
    return HostMemory(nbytes, pin_for=torch.device("cuda", 0))


def test_a_budget_is_not_pinned_before_it_is_used(driver: Driver) -> None:
    memory = pinned_memory(1 << 34)
    assert driver.registered == {}
    assert not memory.pinned
    used = memory.tensor(1 << 33, 5 * KIB)
    assert driver.holds(used)
    assert sum(driver.registered.values()) <= 2 * EXTENT
    assert memory.pinned


@given(ranges=st.lists(st.tuples(st.integers(0, NBYTES - 1), st.integers(1, NBYTES)), max_size=20))
def test_what_is_handed_out_is_pinned_whole_and_once(ranges: list[tuple[int, int]]) -> None:
    driver = Driver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "KINDS", {"cuda": driver})
        patch.setattr(pinning, "EXTENT_NBYTES", EXTENT)
        memory = pinned_memory()
        for start, nbytes in ranges:
            assert driver.holds(memory.tensor(start, min(nbytes, NBYTES - start)))
        memory.close()
    assert driver.registered == {}


def test_what_cannot_be_pinned_is_said_once_and_what_is_pinned_stays(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.max_nbytes = 3 * EXTENT
    memory = pinned_memory()
    with caplog.at_level(logging.WARNING, "offload"):
        first = memory.tensor(0, EXTENT)
        assert memory.pinned
        rest = memory.tensor(0, NBYTES)
        memory.tensor(8 * EXTENT, EXTENT)
    assert driver.holds(first)
    assert not driver.holds(rest)
    assert not memory.pinned
    assert driver.refused == 1
    (line,) = caplog.messages
    assert "host tier: 64.0 KiB could not be pinned (there is no more), " in line
    assert "lower budget.host or raise `ulimit -l`" in line
    last = rest.fill_(3)[-1:]
    memory.close()
    assert driver.registered == {}
    assert int(last) == 3


def test_what_is_pinned_is_not_given_back_while_a_device_may_use_it(driver: Driver) -> None:
    tier = MemoryTier(Tier.HOST, NBYTES, pinned_memory(), Ledger())
    lease = tier.lease(2 * EXTENT, owner="a", state_class=StateClass.STAGING)
    kept = lease.tensor.fill_(7)
    lease.free()
    assert not tier.gives_back
    tier.give_back(0, NBYTES)
    assert driver.holds(kept)
    assert bool((kept == 7).all())
    assert tier.touched_nbytes >= 2 * EXTENT  # whole extents take RAM
    tier.close()


class Moment:
    """An event or a stream of a device whose work is done at once."""

    def record(self, stream: object = None) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("max_nbytes", [1 << 60, 4 * EXTENT], ids=["all pinned", "some pinned"])
def test_a_copy_is_cut_where_the_driver_would_refuse_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, max_nbytes: int
) -> None:
    for name in ("stream", "event", "current_stream"):
        monkeypatch.setattr(driver, name, lambda *_, **__: Moment())
    driver.max_nbytes = max_nbytes
    memory = pinned_memory()
    here = memory.tensor(12 * KIB, NBYTES - 20 * KIB)
    here.copy_(torch.arange(here.numel()) % 251)
    there = torch.zeros_like(here)
    copied: list[torch.Tensor] = []
    real = torch.Tensor.copy_

    def copy(into: torch.Tensor, source: torch.Tensor, **options: Any) -> torch.Tensor:
        copied.append(source)
        return real(into, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    stream = CopyStream(torch.device("cuda", 0))
    stream.copy(there, here).wait()
    monkeypatch.undo()
    assert len(copied) > 5
    assert all(map(driver.holds_in_one, copied))
    assert torch.equal(there, here)
    assert stream.moved_nbytes == here.numel()


# ---------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("fails_after", [None, 2])
def test_copies_over_many_extents_and_beyond_them_are_right(
    monkeypatch: pytest.MonkeyPatch, fails_after: int | None
) -> None:
    """Also where the driver refuses to pin any more."""
    monkeypatch.setattr(pinning, "EXTENT_NBYTES", 1 << 20)
    device, kind = torch.device("cuda", 0), accelerator.of(torch.device("cuda", 0))
    real, calls = kind.register, 0

    def register(*args: Any) -> str | None:
        nonlocal calls
        calls += 1
        return real(*args) if fails_after is None or calls <= fails_after else "the test says so"

    monkeypatch.setattr(kind, "register", register)
    memory = HostMemory(9 << 20, pin_for=device)
    out, back = memory.tensor(4096, 4 << 20), memory.tensor(5 << 20, 4 << 20)
    out.copy_(torch.arange(out.numel()) % 251)
    there = torch.empty(out.numel(), dtype=torch.uint8, device=device)
    stream = CopyStream(device)
    stream.copy(there, out)
    stream.copy(back, there).wait()
    assert torch.equal(out, back)
    assert memory.pinned == (fails_after is None)
    assert out[: 1 << 19].is_pinned()
    stream.close()
    memory.close()
    torch.empty(1, device=device).fill_(0)  # raises if an error were left
    assert not out[: 1 << 19].is_pinned()
