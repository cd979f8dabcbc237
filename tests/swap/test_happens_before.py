"""What the checker of happens-before finds, and what it does not."""

import threading
from pathlib import Path

import pytest
import torch

from offload.swap.device.streams import CopyStream, WorkStream, mark_here
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import Lease, MemoryTier
from offload.tiers.tier import Tier
from tests.swap.checked_world import CheckedWorld
from tests.swap.happens_before import Order
from tests.swap.order_programs import PROGRAMS, run
from tests.swap.stream_simulation import CUDA


# ------------------------------------------------------------------ clocks and shadow memory
def found(order: Order) -> list[tuple[str, str]]:
    return [(race.earlier.split()[0], race.later.split()[0]) for race in order.races]


@pytest.mark.parametrize("writes", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_two_accesses_are_a_race_if_they_meet_unordered_and_one_writes(writes, overlap, told):
    order = Order()
    first, second = order.agent("first"), order.agent("second")
    order.access(first, 100, 110, "one", write=writes[0])
    if told:
        second.learn(first.tell())
    start = 109 if overlap else 110
    order.access(second, start, start + 10, "another", write=writes[1])
    kinds = ["write" if write else "read" for write in writes]
    assert found(order) == ([tuple(kinds)] if overlap and not told and any(writes) else [])


# ------------------------------------------------------------------ a device
@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> CheckedWorld:
    return CheckedWorld(monkeypatch)


def memory(tier: Tier = Tier.HOST) -> Lease:
    nbytes = 1 << 16
    found = MemoryTier(tier, nbytes, HostMemory(nbytes), Ledger())
    return found.lease(4096, owner="a test", state_class=StateClass.STAGING)


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_is_done_for_a_thread_that_waited_for_it(world, waits):
    source, target = memory(), memory()
    mark = CopyStream(CUDA).copy(target.tensor, source.tensor)
    assert not mark.done()
    if waits:
        mark.wait()
        assert mark.done()
    world.compute("a change", [], [source.tensor])
    assert bool(world.races) is not waits


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_is_ordered_with_another_one_by_an_event(world, waits):
    lease, work = memory(), WorkStream(CUDA)
    with work.entered():
        world.launch("a kernel", [], [lease.tensor])
        mark = mark_here(CUDA)
    if waits:
        mark.before_compute()
    world.launch("another kernel", [lease.tensor], [])
    assert bool(world.races) is not waits


@pytest.mark.parametrize("waits", [True, False])
def test_host_memory_freed_under_a_copy_is_a_race_though_it_is_not_used_again(world, waits):
    source, target = memory(), memory()
    mark = CopyStream(CUDA).copy(target.tensor, source.tensor)
    if waits:
        mark.wait()
    source.free()
    assert bool(world.races) is not waits


def test_a_thread_begins_after_its_parent_and_is_joined_before_what_follows(world):
    lease = memory()
    world.compute("before", [], [lease.tensor])
    thread = threading.Thread(target=world.compute, args=("inside", [], [lease.tensor]))
    thread.start()
    thread.join()
    world.compute("after", [], [lease.tensor])
    assert not world.races


def test_operations_of_pytorch_are_kernels_of_the_model(world):
    lease = memory(Tier.DEVICE)
    world.model.synchronize()
    with world.training():
        lease.tensor.view(torch.float32).add_(1)
    mark = mark_here(CUDA)
    world.compute("a look", [lease.tensor], [])
    assert world.races
    world.races.clear()
    mark.wait()
    world.compute("a look", [lease.tensor], [])
    assert not world.races


# ------------------------------------------------------------------ states
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_states_of_a_device_have_no_races(world, name, tmp_path: Path):
    run(name, world, tmp_path)
    assert not world.races, world.order.report()
