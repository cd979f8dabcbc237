"""States of a device whose streams lag behind: who waits for whom, and for nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from offload.swap.device.device_home import DeviceHomeState, DeviceRecordState
from offload.swap.device.device_state import Links, MirroredState
from offload.swap.device.fences import Fences, OpenReads
from offload.swap.device.staging_ring import Bucket, StagingRing, runs_of
from offload.swap.device.streams import CopyStream, StreamEvent, mark_here
from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import MemoryState
from offload.swap.threads.ordered import OrderedWork
from offload.swap.threads.recorder import Recorder
from offload.tiers.errors import StateError
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
        return MirroredState(home, self.pool, self.links, self.reads, lambda: next_use)

    def at_home(self, pages: int, kind: type[DeviceHomeState] = DeviceHomeState) -> DeviceHomeState:
        lease = self.pool.demand(pages * PAGE_NBYTES, "home", StateClass.PARAMETERS)
        return kind("home", pages * PAGE_NBYTES, PAGE_NBYTES, lease, self.links)

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
    old[1].note_use()  # looks around: nobody can read the first one any more
    second = bench.reads_on_model_stream(old[1].tensor())
    third = bench.mirrored("third", 3, 9)
    run(bench.links.to_device)
    third.prefetch(next_use=0.5)
    assert [state.residency() for state in old] == [Residency.ABSENT, Residency.CLEAN]
    run(bench.links.to_device)
    assert [int(first[0]), int(second[0])] == [1, 0]  # the second reader's turn has not come


def test_a_copy_into_memory_that_nobody_uses_waits_for_nobody(bench: Bench):
    state = bench.mirrored("state", 4, 3)
    reached: list[int] = []
    bench.world.model.put(lambda: reached.append(1))
    state.prefetch(next_use=1.0)
    run(bench.links.to_device)
    assert state.residency() is Residency.CLEAN
    assert not reached


# ------------------------------------------------------------------ updates
def test_what_the_device_updated_in_a_mirror_is_not_copied_there_again(bench: Bench):
    state = bench.mirrored("state", 4, 1)
    state.prefetch(next_use=None)
    piece = state.device_piece(2)
    assert piece is not None
    run(bench.links.to_device)
    piece.fill_(5)
    state.used_device_piece(2, mark_here(CUDA))
    for number in (1, 2):  # the CPU's and the device's
        view = state.host_piece(number).wait()
        view.fill_(6 if number == 1 else 5)
        state.mark_piece_dirty(number)
    moved = bench.links.to_device.moved_nbytes
    assert state.device_piece(1) is None
    found = state.tensor().view(4, PAGE_NBYTES)
    run(bench.links.to_device)
    assert found[:, 0].tolist() == [1, 6, 5, 1]
    assert bench.links.to_device.moved_nbytes - moved == PAGE_NBYTES


def test_records_are_looked_at_in_host_memory_one_at_a_time(bench: Bench):
    records = [bench.at_home(2, DeviceRecordState) for _ in range(2)]
    for number, record in enumerate(records):
        record.blank().fill_(number)
        record.mark_dirty()
    assert [int(record.tensor()[0]) for record in records] == [0, 1]
    with pytest.raises(StateError, match="without host_tensor"):
        records[0].mark_dirty()
    records[1].mark_dirty()


# ------------------------------------------------------------------ leaving
class Packed:
    """An ring of two buffers of 8 elements, and a destination of 16 in runs of 3 ranges (and one
    that no buffer holds)."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        buffers = [bench.host_lease(1).tensor[:16] for _ in range(2)]
        for buffer in buffers:
            buffer.fill_(255)
        self.ring = StagingRing(buffers, bench.links)
        ranges = [range(2), range(2, 3), range(4, 8), range(8, 10), range(10, 11), range(12, 16)]
        self.runs = runs_of(ranges, 8)
        self.whole = torch.zeros(16, dtype=torch.int16)
        self.copies = 0
        copy = bench.links.to_host.copy

        def counted(*args: Any) -> StreamEvent:
            self.copies += 1
            return copy(*args)

        bench.links.to_host.copy = counted  # type: ignore[method-assign]

    def fill(self, index: int, value: int, stream: Any = None) -> Bucket:
        run = self.runs[index]
        assert run is not None
        with self.bench.world.entered(stream or self.bench.world.model):
            bucket = self.ring.bucket(run, index, self.whole)
            room = weak(bucket.room(index).view(torch.uint8))
            (stream or self.bench.world.model).put(lambda: room.fill_(value))
            self.ring.filled(bucket, index)
        return bucket

    def arrived(self, bucket: Bucket) -> list[int]:
        self.ring.when_left(self.ring.sent(bucket), "a bucket", lambda: None).wait()
        return self.values()

    def values(self) -> list[int]:
        return (self.whole // 0x0101).tolist()


def test_a_run_leaves_as_one_copy_when_it_is_complete(bench: Bench):
    packed = Packed(bench)
    for index in (2, 0):
        packed.fill(index, index + 1)
    assert packed.copies == 0
    bucket = packed.fill(1, 2)
    assert packed.copies == 1
    assert packed.arrived(bucket)[:8] == [1, 1, 2, -1, 3, 3, 3, 3]  # -1: nobody's
    assert packed.copies == 1


def test_an_open_bucket_leaves_before_another_or_a_single_gradient(bench: Bench):
    packed = Packed(bench)
    first, second = packed.fill(0, 1), packed.fill(3, 4)
    assert first.mark is not None
    assert second.mark is None
    single = torch.zeros(4, dtype=torch.uint8)
    filled = packed.ring.take(4)
    assert second.mark is not None
    to = weak(filled)
    bench.world.model.put(lambda: to.fill_(9))
    packed.ring.send(single, filled).wait()
    assert single.tolist() == [9] * 4
    assert packed.values() == [1, 1, 0, 0, 0, 0, 0, 0, 4, 4, 0, 0, 0, 0, 0, 0]


def test_a_bucket_waits_for_all_streams_that_fill_it_and_they_for_its_buffer(bench: Bench):
    packed = Packed(bench)
    streams = [bench.world.new_stream(name) for name in ("one", "two")]
    for turn in range(5):
        for index in range(3):
            bucket = packed.fill(index, 10 * turn + index, streams[(index + turn) % 2])
    assert packed.arrived(bucket)[:8] == [40, 40, 41, -1, 42, 42, 42, 42]
    assert packed.copies == 5


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


def test_a_closed_queue_of_collectives_has_done_what_its_stream_was_given(bench: Bench):
    order, done = OrderedWork("collectives", CUDA), list[int]()
    order.submit("a kernel", lambda: bench.world.current().put(lambda: done.append(1))).wait()
    assert not done
    order.close()
    assert done == [1]


def test_recorded_copies_follow_each_other_on_their_link(bench: Bench) -> None:
    stream, recorder = bench.links.to_device, Recorder(1, dict)
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    stream.copy(target, source)
    stream.lane.recorder = recorder
    mark = [stream.copy(target[:n], source[:n]) for n in (16, 64)][-1]
    bench.world.watching.set()
    stream.transfer(mark, "the last one").wait()
    first, second = (event for event in recorder.events if event.lane == "host to device")
    assert (first.nbytes, second.nbytes) == (16, 64)
    assert first.start_s <= first.stop_s <= second.start_s <= second.stop_s
