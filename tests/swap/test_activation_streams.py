"""Saved activations of a device whose streams lag behind: whose memory is given out again when.

PyTorch gives freed memory out again at once, to what the stream that it was made on is given next.
Here the tests play that allocator: they keep all memory that copies work in, and let the model's
stream write to it as soon as the tier has let go of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.swap.activations import activation_returns
from offload.swap.activations.activation_record import SavedStorage
from offload.swap.activations.activation_window import ActivationWindow
from offload.swap.activations.activations import ActivationTier, Parked
from offload.swap.device.device_state import Links
from offload.swap.device.streams import CopyStream
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import MemoryTier
from offload.tiers.tier import Tier
from tests.swap.stream_simulation import CUDA, World, weak

PAGE = 4096
WINDOW = 64 * PAGE
REUSED = 7  # what the model writes into memory that was given out again


@dataclass
class Bench:
    """A tier of activations that live in the window, and the streams around it."""

    world: World
    links: Links
    tier: ActivationTier
    spare: Tensor

    def park(self, tensor: Tensor) -> Parked:
        parked = self.tier.keep(tensor)
        assert parked is not None
        return parked

    def park_away(self, *tensors: Tensor) -> list[Parked]:
        """Tensors whose own memory is gone with the caller's last reference."""
        parked = [self.park(tensor) for tensor in tensors]
        self.finish_copies()
        self.park(self.spare)  # lets go of memory whose copies have left
        return parked

    def record(self, number: int) -> SavedStorage:
        return self.tier._records[number]

    def holds(self, memory: Tensor) -> bool:
        """Whether the tier keeps `memory` for a copy."""
        held = [copy.memory for copy, _ in self.tier._copies._copies]
        return any(each.data_ptr() == memory.data_ptr() for each in held)

    def reuse(self, memory: Tensor) -> None:
        """Queue a kernel of the model that writes to `memory`, which it was given."""
        assert not self.holds(memory)
        target = weak(memory.view(torch.uint8))
        self.world.model.put(lambda: target.fill_(REUSED))

    def finish_copies(self) -> None:
        for stream in (self.links.to_host, self.links.to_device):
            stream._stream.synchronize()  # type: ignore[union-attr]

    def finish(self) -> None:
        """The model's stream gets to its end, then the others do."""
        self.world.model.synchronize()
        self.finish_copies()


def filled(value: int) -> Tensor:
    return torch.full((4 * PAGE,), value, dtype=torch.uint8)


def on_another_stream(world: World, call: Callable[[], Any]) -> Any:
    """`call()` in a thread whose current stream is not the model's."""
    found: list[Any] = []

    def run() -> None:
        with world.entered(world.stream(CUDA)):
            found.append(call())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    world = World(monkeypatch, eager_model=False)
    lock, ledger = threading.RLock(), Ledger()
    host = MemoryTier(Tier.HOST, WINDOW, HostMemory(WINDOW), ledger)
    lease = host.lease(WINDOW, owner="window", state_class=StateClass.ACTIVATIONS)
    links = Links(CopyStream(CUDA), CopyStream(CUDA), CUDA)
    tier = ActivationTier(
        ActivationWindow(lease), None, 0, links, lock, device=torch.device("cpu"), in_place=False,
        least_nbytes=1,
    )  # fmt: skip
    yield Bench(world, links, tier, filled(255))
    links.close()
    ledger.check_integrity()


def leave_room(patch: pytest.MonkeyPatch, pages: int) -> None:
    """For device memory that copies in flight may hold."""
    patch.setattr(activation_returns, "DEVICE_NBYTES", pages * PAGE)


def test_a_thread_that_makes_room_lets_the_stream_wait_that_the_memory_belongs_to(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_room(monkeypatch, 4)
    saved = filled(1)
    parked = bench.park(saved)
    assert bench.holds(saved)
    later = on_another_stream(bench.world, lambda: bench.park(filled(2)))
    bench.reuse(saved)
    bench.finish()
    slots = [bench.record(number).pieces[0].slot for number in range(2)]
    assert [int(slot.tensor[0]) for slot in slots if slot is not None] == [1, 2]
    del parked, later


def test_what_was_copied_ahead_for_one_stream_is_not_given_to_another(bench: Bench) -> None:
    parked = bench.park_away(filled(0), filled(1))
    last = parked[1].tensor()
    ahead = bench.record(0).ahead
    assert ahead is not None
    back = on_another_stream(bench.world, parked[0].tensor)
    assert back.data_ptr() != ahead.memory.data_ptr()
    assert bench.holds(ahead.memory)  # nobody waits for its copy
    bench.finish()
    assert [int(back[0]), int(last[0])] == [0, 1]


def test_what_was_given_to_one_stream_is_copied_again_for_another(bench: Bench) -> None:
    (parked,) = bench.park_away(filled(1))
    first = parked.tensor()
    assert parked.tensor().data_ptr() == first.data_ptr()
    second = on_another_stream(bench.world, parked.tensor)  # which has not waited for the first
    assert second.data_ptr() != first.data_ptr()
    bench.finish()
    assert [int(first[0]), int(second[0])] == [1, 1]


def test_memory_that_a_failed_fetch_was_filling_is_kept_until_its_copies_are_done(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (parked,) = bench.park_away(torch.full((WINDOW // 2,), 1, dtype=torch.uint8))  # two pieces
    real, targets = bench.links.to_device.copy, list[Tensor]()

    def copy(destination: Tensor, source: Tensor, after: Any = None) -> Any:
        if targets:
            raise OSError("the second piece")
        targets.append(destination)
        return real(destination, source, after)

    monkeypatch.setattr(bench.links.to_device, "copy", copy)
    with pytest.raises(OSError, match="the second piece"):
        parked.tensor()
    assert bench.holds(targets[0])
