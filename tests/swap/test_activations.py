"""Saved activations away from the device: what travels, what stays, and that nothing is left."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from offload.swap.activations import DEVICE_NBYTES
from offload.swap.activations.activation_record import DeviceCopy
from offload.swap.activations.activation_returns import CopiesInFlight
from offload.swap.activations.activation_window import ActivationWindow
from offload.swap.activations.activations import ActivationTier, Parked
from offload.swap.device.device_slot import Links
from offload.swap.device.streams import CopyStream
from offload.swap.io.block_store import BlockStore
from offload.swap.io.swap_file import SwapFile
from offload.swap.io.threads_backend import ThreadsBackend
from offload.tiers.errors import StorageError, StuckError
from offload.tiers.file_tier import FileTier
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory import HostMemory
from offload.tiers.memory_tier import MemoryTier
from offload.tiers.tier import Tier

PAGE = 4096
CPU = torch.device("cpu")


@dataclass
class Bench:
    tier: ActivationTier
    window: ActivationWindow
    files: FileTier
    ledger: Ledger
    store: BlockStore
    links: Links

    def park(self, tensor: Tensor) -> Parked:
        parked = self.tier.keep(tensor)
        assert parked is not None
        return parked

    def stays(self, tensor: Tensor) -> bool:
        return self.tier.keep(tensor) is None

    @property
    def disk_nbytes(self) -> int:
        return self.files.account.by_class[StateClass.ACTIVATIONS]

    def assert_nothing_is_left(self) -> None:
        self.tier.settle()
        assert self.tier.parked_nbytes == 0
        assert self.disk_nbytes == 0
        assert self.window.arena.used_nbytes == 0
        assert len(self.store._records) == 0
        self.ledger.check_integrity()


Make = Callable[..., Bench]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A factory: `window` and `disk` in pages. At the end the books must balance."""
    made: list[Bench] = []

    def build(
        window: int = 64, disk: int = 1024, *, stored: bool = True, in_place: bool = True,
        min_nbytes: int = 1, backend: Any = None,
    ) -> Bench:  # fmt: skip
        lock, ledger = threading.RLock(), Ledger()
        host = MemoryTier(Tier.HOST, window * PAGE, HostMemory(window * PAGE), ledger)
        lease = host.lease(window * PAGE, owner="window", state_class=StateClass.ACTIVATIONS)
        files = FileTier(disk * PAGE, [1.0], ledger)
        store = BlockStore([SwapFile(tmp_path)], files, backend or ThreadsBackend(), lock=lock)
        links = Links(CopyStream(CPU), CopyStream(CPU))
        cut = ActivationWindow(lease)
        tier = ActivationTier(
            cut, store if stored else None, disk * PAGE if stored else 0, links, lock,
            device=CPU, in_place=in_place, min_nbytes=min_nbytes,
        )  # fmt: skip
        made.append(Bench(tier, cut, files, ledger, store, links))
        return made[-1]

    yield build
    for bench in made:
        bench.store.close()
        bench.ledger.check_integrity()


def noise(pages: float, seed: int = 0) -> Tensor:
    """Of so many pages, fp32, with a graph behind it as an activation has."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(pages * PAGE) // 4, generator=generator)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


# ------------------------------------------------------------------------------ what travels
def test_what_is_parked_comes_back_with_shape_stride_and_bits(make: Make) -> None:
    bench = make()
    base = noise(4).view(64, 64)
    for tensor in (base, base.t(), base[3:9, ::2], base.view(torch.int32), base[0].expand(5, 64)):
        expected = tensor.clone()
        back = bench.park(tensor).tensor()
        assert same(back, expected)
        assert back.stride() == tensor.stride()


def test_views_of_one_storage_travel_once_and_come_back_over_one_storage(make: Make) -> None:
    bench = make()
    base = noise(6)
    expected = [chunk.clone() for chunk in base.chunk(3)]
    parked = [bench.park(chunk) for chunk in base.chunk(3)]
    del base
    assert bench.tier.bytes_moved()["activations parked"] == 6 * PAGE
    back = [each.tensor() for each in parked]
    assert all(same(b, e) for b, e in zip(back, expected, strict=True))
    assert len({each.untyped_storage().data_ptr() for each in back}) == 1


def test_a_storage_changed_between_two_saves_travels_twice(make: Make) -> None:
    bench = make()
    x = noise(4)
    first, before = bench.park(x), x.clone()
    x.add_(1)
    second, after = bench.park(x), x.clone()
    del x
    assert same(first.tensor(), before)
    assert same(second.tensor(), after)


def test_a_new_tensor_where_a_parked_one_lay_is_not_mistaken_for_it(make: Make) -> None:
    bench = make()
    kept: list[Parked] = []
    addresses = set[int]()
    while len(addresses) == len(kept) < 400:  # until the allocator gives the same memory again
        x = noise(2, len(kept))
        addresses.add(x.data_ptr())
        kept.append(bench.park(x))
        del x
    assert len(addresses) < len(kept)
    assert all(same(parked.tensor(), noise(2, seed)) for seed, parked in enumerate(kept))


def test_without_a_store_the_window_is_their_home(make: Make) -> None:
    bench = make(window=32, stored=False, in_place=False)
    parked = [bench.park(noise(4, seed)) for seed in range(8)]
    assert bench.stays(noise(4))
    for seed in reversed(range(8)):
        assert same(parked[seed].tensor(), noise(4, seed))
    assert bench.links.to_host.moved_nbytes == 8 * 4 * PAGE
    assert bench.links.to_device.moved_nbytes == 8 * 4 * PAGE
    parked.clear()
    bench.assert_nothing_is_left()


# ------------------------------------------------------------------------------ budgets
def test_one_copy_of_any_size_may_be_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's input of a long sequence leaves while the block computes; a second one waits."""

    class Mark:
        ended = False

        def done(self) -> bool:
            return self.ended

        def before(self, stream: Any) -> None:
            waits.append(self)

    waits: list[Mark] = []
    marks = [Mark() for _ in range(4)]
    copies = CopiesInFlight(threading.RLock())
    nbytes = DEVICE_NBYTES + 1
    for index, mark in enumerate(marks[:3]):
        copies.hold(DeviceCopy(torch.empty(0), mark, None), nbytes)  # type: ignore[arg-type]
        assert waits == marks[:index]
    marks[2].ended = True
    copies.hold(DeviceCopy(torch.empty(0), marks[3], None), nbytes)  # type: ignore[arg-type]
    assert waits == marks[:2]


def test_a_full_disk_leaves_the_rest_where_it_is_and_says_so_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make(window=16, disk=32)
    kept: dict[int, Parked] = {}
    with caplog.at_level(logging.WARNING):
        for seed in range(30):
            parked = bench.tier.keep(noise(4, seed))
            if parked is not None:
                kept[seed] = parked
            assert bench.disk_nbytes <= 32 * PAGE
    assert 8 <= len(kept) <= 12  # what disk and window hold
    assert bench.tier.bytes_moved()["activations stayed"] == (30 - len(kept)) * 4 * PAGE
    (record,) = caplog.records
    said = record.getMessage()
    assert "16.0 KiB stay in device memory: nvme tier full" in said
    assert "raise budget.nvme" in said
    assert all(same(parked.tensor(), noise(4, seed)) for seed, parked in kept.items())
    kept.clear()
    bench.assert_nothing_is_left()


def test_a_failed_write_is_raised_where_room_is_needed_next(make: Make) -> None:
    def broken(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(5, "Input/output error")

    bench = make(window=16, backend=ThreadsBackend(pwritev=broken))
    parked = []

    def fill() -> None:
        for seed in range(20):
            parked.append(bench.park(noise(4, seed)))

    with pytest.raises(StorageError, match="EIO"):
        fill()


def test_a_failed_read_is_raised_where_the_bytes_are_needed(make: Make) -> None:
    broken: list[int] = []

    def read(fd: int, buffers: Any, offset: int) -> int:
        if broken:
            raise OSError(5, "Input/output error")
        return os.preadv(fd, buffers, offset)

    bench = make(window=16, backend=ThreadsBackend(preadv=read))
    parked = [bench.park(noise(4, seed)) for seed in range(20)]
    broken.append(5)
    with pytest.raises(StorageError, match="EIO"):
        parked[0].tensor()
    broken.clear()
    assert same(parked[0].tensor(), noise(4, 0))  # trying again is allowed


def test_a_slot_that_a_late_read_may_fill_is_not_used_again(make: Make) -> None:
    go_on, held = threading.Event(), threading.Event()

    def read(fd: int, buffers: Any, offset: int) -> int:
        held.set()
        assert go_on.wait(30)
        return os.preadv(fd, buffers, offset)

    backend = ThreadsBackend(preadv=read, timeout_s=1e6)
    bench = make(window=16, backend=backend)
    parked = [bench.park(noise(4, seed)) for seed in range(20)]
    bench.tier.settle()
    del parked[8:]  # as far as backward has come: the window is free
    assert bench.window.arena.used_nbytes == 0
    raised = threading.Event()

    def look() -> None:
        assert held.wait(30)
        while not raised.is_set():  # also at those that are begun ahead of use
            backend.watch.look()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with pytest.raises(StuckError, match="saved activations"):
            parked[-1].tensor()
    finally:
        raised.set()
        looking.join()
    parked.clear()
    assert bench.window.arena.used_nbytes > 0  # what is on its way keeps its place
    go_on.set()


# ------------------------------------------------------------------------------ any order
@settings(
    derandomize=True, max_examples=30, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    window=st.sampled_from([4, 16, 40]), disk=st.sampled_from([8, 64, 1024]),
    in_place=st.booleans(),
    moves=st.lists(
        st.tuples(st.sampled_from("saaarrrdk"), st.integers(0, 30), st.sampled_from([0.3, 2, 9])),
        max_size=80,
    ),
)  # fmt: skip
def test_whatever_is_saved_read_kept_and_dropped_the_bytes_are_right_and_the_budgets_hold(
    make: Make, window: int, disk: int, in_place: bool,
    moves: list[tuple[str, int, float]],
) -> None:  # fmt: skip
    bench = make(window=window, disk=disk, in_place=in_place)
    saved: list[tuple[Parked, int, float]] = []
    looked_at: list[tuple[Tensor, int, float]] = []
    for count, (move, index, pages) in enumerate(moves):
        if move in "sa":
            parked = bench.tier.keep(noise(pages, count))
            if parked is not None:
                saved.append((parked, count, pages))
        elif saved and move in "rk":
            parked, seed, size = saved[index % len(saved)]
            back = parked.tensor()
            assert same(back, noise(size, seed))
            if move == "k":
                looked_at.append((back, seed, size))
            del back, parked
        elif saved and move == "d":
            del saved[index % len(saved)]
        assert bench.disk_nbytes <= disk * PAGE
        assert bench.window.arena.used_nbytes <= window * PAGE
        bench.window.arena.check()
    for parked, seed, size in saved:
        assert same(parked.tensor(), noise(size, seed))
    assert all(same(back, noise(size, seed)) for back, seed, size in looked_at)
    saved.clear()
    looked_at.clear()
    parked = back = None  # type: ignore[assignment]
    bench.assert_nothing_is_left()
