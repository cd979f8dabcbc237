"""States of a device whose streams lag behind: each access waits for what it needs, and no more."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from offload.swap.device.device_home import DeviceHomeState
from offload.swap.device.device_slot import DeviceSlot, Links, OpenReads
from offload.swap.device.fences import Fences
from offload.swap.device.mirrored_state import MirroredState
from offload.swap.device.streams import CopyStream
from offload.swap.states.memory_state import MemoryState
from offload.swap.states.slot_pool import SlotPool
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import Lease, MemoryTier
from offload.tiers.tier import PAGE_NBYTES, Residency, Tier
from tests.swap.stream_simulation import CUDA, World, weak

PAGES = 8


@dataclass
class Bench:
    """A device of 8 pages (host memory in its place) and the streams around it."""

    world: World
    links: Links
    host: MemoryTier
    device: MemoryTier
    pool: SlotPool
    reads: OpenReads

    def host_lease(self, pages: int) -> Lease:
        return self.host.lease(pages * PAGE_NBYTES, owner="home", state_class=StateClass.PARAMETERS)

    def mirrored(self, name: str, pages: int, fill: int, next_use: float = 1.0) -> MirroredState:
        """Parameters of so many pages, a piece each, at home in host memory."""
        lease = self.host_lease(pages)
        lease.tensor.fill_(fill)
        home = MemoryState(name, pages * PAGE_NBYTES, PAGE_NBYTES, lease)
        return MirroredState(home, self.slot(name, pages * PAGE_NBYTES, next_use))

    def slot(self, name: str, nbytes: int, next_use: float = 1.0) -> DeviceSlot:
        return DeviceSlot(
            name, nbytes, StateClass.PARAMETERS, self.pool, lambda: next_use, self.links, self.reads
        )

    def at_home(self, pages: int, *, is_record: bool = False) -> DeviceHomeState:
        nbytes = pages * PAGE_NBYTES
        lease = self.pool.demand(nbytes, "home", StateClass.PARAMETERS)
        return DeviceHomeState("home", nbytes, PAGE_NBYTES, lease, self.links, is_record=is_record)

    def reads_on_model_stream(self, view: torch.Tensor) -> torch.Tensor:
        """Queue a kernel of the model that reads `view`; what it will have read."""
        seen, source = torch.zeros_like(view), weak(view)
        self.world.model.put(lambda: seen.copy_(source))
        return seen


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    world = World(monkeypatch, eager_model=False)
    ledger = Ledger()
    host = MemoryTier(Tier.HOST, 1 << 20, HostMemory(1 << 20), ledger)
    nbytes = PAGES * PAGE_NBYTES
    device = MemoryTier(Tier.DEVICE, nbytes, HostMemory(nbytes), ledger)
    links = Links(CopyStream(CUDA), CopyStream(CUDA), CUDA, Fences())
    pool = SlotPool(device, threading.RLock())
    yield Bench(world, links, host, device, pool, OpenReads(CUDA))
    world.watching.set()
    links.close()
    ledger.check_integrity()


def run(stream: CopyStream) -> None:
    """Everything the stream was given happens now, and what that waits for."""
    stream._stream.synchronize()  # type: ignore[union-attr]


# ------------------------------------------------------------------ slots that change hands
def test_a_copy_waits_only_for_readers_of_its_own_range(bench: Bench):
    old = [bench.mirrored(f"old {number}", 4, number + 1) for number in range(2)]
    first = bench.reads_on_model_stream(old[0].tensor())
    old[1].note_use()  # also finds that the first one has no readers left
    second = bench.reads_on_model_stream(old[1].tensor())
    third = bench.mirrored("third", 3, 9)
    run(bench.links.to_device)
    third.prefetch(next_use=0.5)
    assert [state.residency() for state in old] == [Residency.ABSENT, Residency.CLEAN]
    run(bench.links.to_device)
    assert [int(first[0]), int(second[0])] == [1, 0]  # the second reader's turn has not come


def test_a_mirror_that_two_threads_prefetch_holds_one_slot(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    state, demand = bench.mirrored("state", 2, 1), bench.pool.demand

    def late(nbytes: int, owner: str, state_class: StateClass) -> Lease:
        lease = demand(nbytes, owner, state_class)
        patched.undo()
        state.prefetch(next_use=None)  # as another thread would that is faster
        return lease

    with monkeypatch.context() as patched:
        patched.setattr(bench.pool, "demand", late)
        state.prefetch(next_use=None)
    assert bench.device.used_nbytes == state.slot.held_nbytes == 2 * PAGE_NBYTES


def test_what_fails_after_a_copy_is_the_error_of_its_transfer(bench: Bench):
    stream = bench.links.to_host
    ends = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]

    def fail() -> None:
        raise OSError("no space")

    failed = stream.transfer(stream.copy(*ends), "a copy", fail)
    later = stream.transfer(stream.copy(*ends), "another")
    later.wait()
    with pytest.raises(OSError, match="no space"):
        failed.wait()
