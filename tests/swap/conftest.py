"""Memory as the arenas hand it out, stores on a real disk and on tmpfs."""

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from offload.swap.io.block_store import BlockStore
from offload.swap.io.io_backend import IOBackend
from offload.swap.io.swap_file import SwapFile
from offload.swap.io.threads_backend import ThreadsBackend
from offload.tiers.file_tier import FileTier
from offload.tiers.ledger import Ledger


def make_pages(nbytes: int, fill: bytes = b"") -> memoryview:
    """Page-aligned memory of `nbytes`, starting with `fill`."""
    view = memoryview(mmap.mmap(-1, nbytes))
    view[: len(fill)] = fill
    return view


@dataclass
class Bench:
    store: BlockStore
    files: list[SwapFile]
    tier: FileTier
    ledger: Ledger
    lock: threading.RLock


@pytest.fixture
def pages() -> Callable[..., memoryview]:
    return make_pages


@pytest.fixture
def noise() -> Callable[[int], memoryview]:
    return lambda nbytes: make_pages(nbytes, os.urandom(nbytes))


@pytest.fixture(params=["disk", "shm"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on the file system of the tests (ext4, say), and one on tmpfs, which accepts
    everything."""
    if request.param == "disk":
        yield tmp_path
        return
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    folder = Path("/dev/shm") / f"offload-test-{os.getpid()}-{tmp_path.name}"
    folder.mkdir(mode=0o700)
    yield folder
    folder.rmdir()  # fails if anything is left behind


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    """A factory of stores; at the end all are closed and their books must balance."""
    made: list[Bench] = []

    def make(
        *directories: Path, backend: IOBackend | None = None, budget_nbytes: int = 256 << 20
    ) -> Bench:
        files = [SwapFile(path) for path in directories]
        ledger, lock = Ledger(), threading.RLock()
        tier = FileTier(budget_nbytes, [1.0] * len(files), ledger)
        store = BlockStore(
            files, tier, backend or ThreadsBackend(), lock=lock, growth_nbytes=1 << 20
        )
        made.append(Bench(store, files, tier, ledger, lock))
        return made[-1]

    yield make
    for bench in made:
        bench.store.close()
        bench.ledger.check_integrity()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def no_leak() -> Iterator[None]:
    """No thread, and no descriptor, is there after the test that was not before."""
    fds, threads = open_fds(), set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)  # it has done its work, and may not have ended yet
        assert not thread.is_alive()
    assert open_fds() == fds
