"""Short programs of states on a device whose order is checked (`CheckedWorld`), each of which
needs some wait. `PROGRAMS` has them by name, and `run` runs one: its races are in the world's
order."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.kernels.floats import Float, serial
from offload.swap.activations.activation_window import ActivationWindow
from offload.swap.activations.activations import ActivationTier
from offload.swap.device.device_home import DeviceHomeState
from offload.swap.device.device_slot import Links, OpenReads
from offload.swap.device.fences import Fences
from offload.swap.device.staging_ring import StagingRing, runs_of
from offload.swap.device.streams import CopyStream, WorkStream, mark_here
from offload.swap.io.block_store import BlockStore
from offload.swap.io.swap_file import SwapFile
from offload.swap.io.threads_backend import ThreadsBackend
from offload.swap.states.cached_file_state import CachedFileState
from offload.swap.states.slot import Slot
from offload.swap.states.slot_pool import SlotPool
from offload.tiers.errors import TierFullError
from offload.tiers.file_tier import FileTier
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import MemoryTier
from offload.tiers.tier import PAGE_NBYTES, Tier
from offload.zero.gradients.gradient_paths import DevicePartials
from offload.zero.gradients.gradients import GradientAccumulator
from offload.zero.groups.layout import ParamSpec
from offload.zero.step.chunks import ChunkBytes
from tests.swap.checked_world import CheckedWorld
from tests.swap.stream_simulation import CUDA
from tests.swap.test_device_state import PAGES, Bench

CPU = torch.device("cpu")


@dataclass
class CheckedBench(Bench):
    """The bench of the tests of these states, with a device whose order is checked."""

    world: CheckedWorld
    stores: list[BlockStore] = field(default_factory=list)  # closed when the program has ended

    @classmethod
    def make(cls, world: CheckedWorld) -> CheckedBench:
        ledger = Ledger()
        host = MemoryTier(Tier.HOST, 1 << 20, HostMemory(1 << 20), ledger)
        nbytes = PAGES * PAGE_NBYTES
        device = MemoryTier(Tier.DEVICE, nbytes, HostMemory(nbytes), ledger)
        links = Links(CopyStream(CUDA), CopyStream(CUDA), CUDA, Fences())
        world.fences = links.fences
        world.model.synchronize()  # what used the memory before is over
        pool = SlotPool(device, threading.RLock())
        return cls(world, links, host, device, pool, OpenReads(CUDA))

    def work(self) -> WorkStream:
        return WorkStream(CUDA)

    def read(self, view: torch.Tensor) -> None:
        self.world.launch("a kernel that reads", [view], [])

    def write(self, view: torch.Tensor) -> None:
        self.world.launch("a kernel that writes", [], [view])

    def page(self) -> torch.Tensor:
        return self.host_lease(1).tensor

    def store(self, folder: Path) -> BlockStore:
        files, lock = FileTier(1 << 20, [1.0], Ledger()), threading.RLock()
        backend = ThreadsBackend(workers=1)
        self.stores.append(BlockStore([SwapFile(folder)], files, backend, lock=lock))
        return self.stores[-1]

    def end(self) -> None:
        self.links.close()
        self.end_of_memory()

    def end_of_memory(self) -> None:
        for tier in (self.device, self.host):
            tier.close()

    def activations(
        self, folder: Path, window: int, disk: int
    ) -> tuple[ActivationTier, BlockStore]:
        """Saved activations away from the device; `window` and `disk` in pages."""
        store, cut = self.store(folder), ActivationWindow(self.host_lease(window))
        tier = ActivationTier(
            cut, store, disk * PAGE_NBYTES, self.links, store._lock, device=CPU, in_place=False,
            min_nbytes=1,
        )  # fmt: skip
        return tier, store

    def in_file(
        self, nbytes: int, store: BlockStore, pool: SlotPool,
        kind: StateClass = StateClass.GRADIENTS,
    ) -> CachedFileState:  # fmt: skip
        slot = Slot("in a file", nbytes, kind, pool, lambda: 1.0)
        return CachedFileState(store, slot, nbytes)

    def gradients(self, folder: Path, count: int, landings: int = 0) -> GradientAccumulator:
        """Of `count` parameters of a page, at home in a file."""
        numel, store = PAGE_NBYTES // 4, self.store(folder)
        pool = SlotPool(self.host, store._lock)
        buffers = [self.at_home(1)._lease.tensor for _ in range(2)]
        ring = StagingRing(
            buffers, self.links.to_host, CUDA, [self.page() for _ in range(landings)]
        )
        partials = DevicePartials(torch.zeros(64, dtype=torch.float64))
        specs = [ParamSpec((str(i),), (numel,), offset=i * numel) for i in range(count)]

        def make(itemsize: int) -> CachedFileState:
            return self.in_file(count * numel * itemsize, store, pool)

        return GradientAccumulator(
            "group", specs, Float.FP32, Float.FP32, make, serial, partials, ring
        )


Program = Callable[[CheckedBench, Path], None]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


def run(name: str, world: CheckedWorld, folder: Path) -> None:
    bench = CheckedBench.make(world)
    try:
        PROGRAMS[name](bench, folder)
        for store in bench.stores:
            store.close()
    finally:
        bench.links.close()  # else a thread waits for copies for good


# ------------------------------------------------------------------ mirrors
@program
def a_home_takes_the_place_of_a_mirror(bench: CheckedBench, folder: Path) -> None:
    """It is written to by the update, which knows nothing of the model's stream."""
    bench.read(bench.mirrored("mirror", 8, 1).tensor())
    while bench.links.to_device.await_oldest():
        pass
    home, work = bench.at_home(4), bench.work()
    with work.entered():
        home.write_piece(0, bench.page()).wait()


@program
def a_mirror_is_read_on_two_streams(bench: CheckedBench, folder: Path) -> None:
    mirror = bench.mirrored("mirror", 8, 1)
    bench.read(mirror.tensor())
    mirror.note_use()
    with bench.work().entered():
        bench.read(mirror.tensor())
        mirror.note_use()
    while bench.links.to_device.await_oldest():
        pass
    home = bench.at_home(4)
    with bench.work().entered():
        home.write_piece(0, bench.page()).wait()


@program
def a_mirror_that_is_viewed_is_filled_again(bench: CheckedBench, folder: Path) -> None:
    state = bench.mirrored("state", 4, 1)
    view = state.tensor()
    bench.read(view)
    state.host_tensor().fill_(2)
    state.mark_host_dirty()
    state.prefetch(next_use=None)
    bench.read(state.tensor())


@program
def a_mirror_is_discarded_while_it_arrives(bench: CheckedBench, folder: Path) -> None:
    state = bench.mirrored("state", 4, 1)
    state.prefetch(next_use=1.0)
    state.discard()


@program
def a_mirror_is_settled(bench: CheckedBench, folder: Path) -> None:
    state = bench.mirrored("state", 4, 1)
    state.prefetch(next_use=1.0)
    state.settle()
    bench.end_of_memory()


@program
def a_home_is_updated_while_it_is_copied(bench: CheckedBench, folder: Path) -> None:
    state = bench.mirrored("state", 4, 1)
    state.prefetch(next_use=1.0)
    bench.world.compute("a step", [], [state.host_piece(0).wait()])
    state.mark_piece_dirty(0)


@program
def a_home_is_changed_while_it_is_copied(bench: CheckedBench, folder: Path) -> None:
    for number, get in enumerate((lambda s: s.host_blank(), lambda s: s.host_tensor())):
        state = bench.mirrored(f"state {number}", 4, 1)
        state.prefetch(next_use=1.0)
        bench.world.compute("a change", [], [get(state)])
        state.mark_host_dirty()


# ------------------------------------------------------------------ homes on the device
Act = Callable[[CheckedBench, DeviceHomeState], object]
ACTS: dict[str, Act] = {
    "written": lambda bench, state: state.write_piece(0, bench.page()),
    "read": lambda bench, state: state.read_piece(0, bench.page()),
    "stepped": lambda bench, state: bench.write(state.device_piece(0)),
    "used by the model": lambda bench, state: bench.read(state.tensor()),
    "changed by the model": lambda bench, state: bench.write(state.tensor()),
}


def in_turn(first: str, second: str) -> Program:
    """What is done to a piece by the update and then by it or, behind it, by the model."""

    def act(bench: CheckedBench, folder: Path) -> None:
        state, work = bench.at_home(2), bench.work()
        with work.entered():
            ACTS[first](bench, state)
            if "model" not in second:
                ACTS[second](bench, state)
        if "model" in second:
            ACTS[second](bench, state)

    return act


PROGRAMS |= {
    f"a piece is {first}, then {second}": in_turn(first, second)
    for first, second in (
        ("written", "read"), ("read", "written"), ("written", "stepped"),
        ("written", "used by the model"), ("read", "changed by the model"),
    )
}  # fmt: skip


@program
def a_piece_is_stepped_then_loaded(bench: CheckedBench, folder: Path) -> None:
    state, work = bench.at_home(2), bench.work()
    with work.entered():
        bench.write(state.device_piece(0))
        state.used_device_piece(0, mark_here(CUDA))
    state.host_blank().fill_(1)
    state.mark_host_dirty()


@program
def a_record_is_stepped_then_looked_at(bench: CheckedBench, folder: Path) -> None:
    state, work = bench.at_home(2, is_record=True), bench.work()
    with work.entered():
        bench.write(state.device_piece(0))
        state.used_device_piece(0, mark_here(CUDA))
    bench.world.compute("a look", [state.tensor()], [])


@program
def buffers_of_a_staged_piece_are_dropped(bench: CheckedBench, folder: Path) -> None:
    state = bench.at_home(2)
    state.read_piece(0, torch.zeros(PAGE_NBYTES, dtype=torch.uint8))
    state.write_piece(0, torch.zeros(PAGE_NBYTES, dtype=torch.uint8))


@program
def a_home_is_settled(bench: CheckedBench, folder: Path) -> None:
    state = bench.at_home(2)
    state.write_piece(0, bench.page())
    state.settle()
    bench.end_of_memory()


@program
def a_home_is_closed_while_it_is_copied(bench: CheckedBench, folder: Path) -> None:
    state, work = bench.at_home(8), bench.work()
    with work.entered():
        state.write_piece(0, bench.page())
    state.close()
    taken = bench.mirrored("taken", 8, 2)
    taken.prefetch(next_use=None)


@program
def a_home_is_closed_while_the_model_reads_it(bench: CheckedBench, folder: Path) -> None:
    state = bench.at_home(8)
    bench.read(state.tensor())
    state.close()
    taken = bench.mirrored("taken", 8, 2)
    taken.prefetch(next_use=None)


# ------------------------------------------------------------------ ends
@program
def copies_end_with_their_stream(bench: CheckedBench, folder: Path) -> None:
    """Of one that is not watched, and of what is done after another."""
    ends = [bench.at_home(1)._lease.tensor for _ in range(2)]
    bench.links.to_device.copy(ends[0], bench.page())
    page, told = bench.page(), bench.world.compute
    mark = bench.links.to_host.copy(page, ends[1])
    ended = bench.links.to_host.transfer(mark, "a copy", lambda: told("a note", [], [page]))
    bench.end()
    ended.wait()


@program
def work_ends_with_its_stream(bench: CheckedBench, folder: Path) -> None:
    state, work = bench.at_home(2), bench.work()
    with work.entered():
        bench.write(state.device_piece(0))
    work.close()
    bench.end_of_memory()


@program
def homes_are_closed_while_all_is_under_way(bench: CheckedBench, folder: Path) -> None:
    plan: Any = SimpleNamespace(device=None, groups=())  # without kernels of offload
    homes = bench.world.device_homes(plan, bench.device, CUDA, threading.RLock())
    ends = [bench.at_home(1)._lease.tensor for _ in range(5)]
    with homes._stream.entered():
        bench.write(ends[0])
    pairs = (homes.links, *ends[1:3]), (homes._update_links, *ends[3:])
    for links, comes, goes in pairs:
        links.to_device.copy(comes, bench.page())
        links.to_host.copy(bench.page(), goes)
    homes.close()
    bench.end_of_memory()


@program
def a_bucket_is_filled_on_two_streams(bench: CheckedBench, folder: Path) -> None:
    ring = StagingRing(
        [bench.at_home(1)._lease.tensor for _ in range(2)], bench.links.to_host, CUDA
    )
    runs, whole = runs_of([range(100), range(100, 300)], PAGE_NBYTES), bench.page()
    streams = [bench.work(), bench.work()]
    for _ in range(3):
        for index, (run, stream) in enumerate(zip(runs, streams, strict=True)):
            with stream.entered():
                bucket = ring.bucket(run, index, whole.dtype, whole)
                bench.write(bucket.room(index))
                ring.filled(bucket, index)
        assert bucket.mark is not None
        bucket.mark.wait()  # the next bucket has another buffer, and the same destination


# ------------------------------------------------------------------ homes in files
@program
def memory_is_short_while_some_is_filled(bench: CheckedBench, folder: Path) -> None:
    store = bench.store(folder)
    pool = SlotPool(bench.host, store._lock)
    state = bench.in_file(PAGE_NBYTES, store, pool, StateClass.PARAMETERS)
    view = state.blank()
    bench.links.to_host.copy(view, bench.at_home(1)._lease.tensor)
    with pytest.raises(TierFullError):
        pool.demand(bench.host.arena.nbytes, "all of it", StateClass.PARAMETERS)


@program
def a_chunk_is_stepped_that_arrives_from_a_file(bench: CheckedBench, folder: Path) -> None:
    store = bench.store(folder)
    state = bench.in_file(PAGE_NBYTES, store, SlotPool(bench.host, store._lock))
    state.blank().fill_(1)
    state.mark_dirty()
    state.write_back()
    state.settle()
    state.slot.evict()
    staged, found = ChunkBytes(state, 0), ChunkBytes(state, 0)
    staged.staged = bench.page()
    staged.arrival = state.read_piece(0, staged.staged)
    state.prefetch(next_use=1.0)
    found.find_in_host_memory()
    for part in (staged, found):
        bench.world.compute("a step", [], [part.wait()])


# ------------------------------------------------------------------ gradients
@program
def a_gradient_is_added_while_the_first_one_leaves(bench: CheckedBench, folder: Path) -> None:
    gradients = bench.gradients(folder, 2)  # that of the second parameter never comes
    for _ in range(2):
        gradients.add(0, made(bench))


@program
def a_gradient_is_added_while_the_sum_goes_home(bench: CheckedBench, folder: Path) -> None:
    gradients = bench.gradients(folder, 1)
    bench.world.late_s = 0.05
    for _ in range(2):
        gradients.add(0, made(bench))
        gradients.landed.wait()
        gradients.state.write_back()
    gradients.clear()


@program
def gradients_land_and_are_added(bench: CheckedBench, folder: Path) -> None:
    """More of them than the ring has buffers."""
    gradients = bench.gradients(folder, 5, landings=2)
    for _ in range(3):
        for index in reversed(range(5)):
            gradients.add(index, made(bench))
    gradients.clear()


@program
def gradients_that_land_are_dropped(bench: CheckedBench, folder: Path) -> None:
    gradients = bench.gradients(folder, 2, landings=2)
    bench.world.late_s = 0.05
    for _ in range(2):
        gradients.add(0, made(bench))
    gradients.drop([0])
    gradients.add(0, made(bench))
    gradients.clear()


def cleared(count: int) -> Program:
    """Gradients of `count` parameters, of which the first one's has come."""

    def clear(bench: CheckedBench, folder: Path) -> None:
        gradients = bench.gradients(folder, count)
        gradients.add(0, made(bench))
        gradients.clear()

    return clear


PROGRAMS["gradients are cleared while they go home"] = cleared(1)
PROGRAMS["gradients are cleared while they leave"] = cleared(2)


# ------------------------------------------------------------------ activations
def made(bench: CheckedBench) -> torch.Tensor:
    """An activation of one page."""
    tensor = torch.zeros(PAGE_NBYTES // 4)
    bench.write(tensor)
    return tensor


@program
def an_activation_comes_back_before_it_has_left(bench: CheckedBench, folder: Path) -> None:
    tier, _ = bench.activations(folder, 8, 8)
    parked = tier.keep(made(bench))
    bench.read(parked.tensor())


@program
def an_activation_dies_on_its_way_back(bench: CheckedBench, folder: Path) -> None:
    tier, _ = bench.activations(folder, 8, 8)
    parked = [tier.keep(made(bench)) for _ in range(2)]
    bench.links.to_host._stream.synchronize()  # they have left, and their memory is free
    parked.append(tier.keep(made(bench)))
    parked[2].tensor()
    ahead = [record.ahead is not None for record in tier._records.values()]
    assert ahead == [True, True, False]
    del parked[:]
    tier.settle()


@program
def an_activation_is_read_past_a_full_window(bench: CheckedBench, folder: Path) -> None:
    tier, store = bench.activations(folder, 2, 1)
    parked = [tier.keep(made(bench)) for _ in range(3)]
    piece = tier._records[0].pieces[0]
    assert piece.slot is None
    target = torch.zeros(PAGE_NBYTES, dtype=torch.uint8)
    tier._returns._copy_unstaged(piece, target)
    store.read(piece.block, bench.host_lease(1).pages(0, PAGE_NBYTES)).wait()
    gc.collect()  # the worker and the transfer of the read before that kept its buffer
    bench.read(parked[0].tensor())
