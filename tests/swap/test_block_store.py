import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.swap.io.block_store import StoredBlock
from offload.swap.io.threads_backend import ThreadsBackend
from offload.tiers.errors import ChecksumError, StateError, StorageError, TierFullError
from offload.tiers.ledger import StateClass
from offload.tiers.tier import PAGE_NBYTES
from tests.aio import needs_libaio

Noise = Callable[[int], memoryview]
Pages = Callable[..., memoryview]
MIB = 1 << 20
TIMEOUT_S = 30.0
REPOSITORY = Path(__file__).parents[2]
OPTIMIZER = StateClass.OPTIMIZER


def put(bench: Any, source: memoryview, **more: Any) -> StoredBlock:
    block = bench.store.write(source, owner="layer.3", state_class=OPTIMIZER, **more)
    return block.wait()  # type: ignore[no-any-return]


def test_a_write_never_touches_what_it_replaces_and_frees_it_afterwards(
    make_bench: Any, directory: Path, noise: Noise, pages: Pages
) -> None:
    bench = make_bench(directory)
    old = put(bench, noise(MIB))
    new = put(bench, noise(MIB), replaces=old)
    assert new.extent != old.extent
    assert bench.tier.account.used_nbytes == MIB
    with pytest.raises(StateError, match="after it was freed"):
        bench.store.read(old, pages(MIB))
    with pytest.raises(StateError, match="after it was freed"):
        bench.store.free(old)


def test_a_failed_write_leaves_the_old_block_valid_and_frees_the_new_extent(
    make_bench: Any, directory: Path, noise: Noise, pages: Pages
) -> None:
    failing: list[int] = []

    def faulty(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if failing:
            raise OSError(failing.pop(), "Input/output error")
        return os.pwritev(fd, buffers, offset)

    bench = make_bench(directory, backend=ThreadsBackend(pwritev=faulty))
    sent, received = noise(MIB), pages(MIB)
    old = put(bench, sent)
    failing.append(5)
    with pytest.raises(StorageError, match="EIO"):
        put(bench, noise(MIB), replaces=old)
    assert bench.tier.account.used_nbytes == MIB
    bench.store.read(old, received).wait()
    assert received == sent
    put(bench, noise(MIB), replaces=old)  # trying again is allowed


def test_a_wait_for_room_ends_when_a_block_was_replaced(
    make_bench: Any, tmp_path: Path, noise: Noise
) -> None:
    gate = threading.Event()

    def held(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        gate.wait(TIMEOUT_S)
        return os.pwritev(fd, buffers, offset)

    bench = make_bench(tmp_path, backend=ThreadsBackend(pwritev=held))
    first = bench.store.write(noise(MIB), owner="a", state_class=OPTIMIZER)
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(bench.store.await_room()))
    gate.set()
    old = first.wait()
    gate.clear()
    second = bench.store.write(noise(MIB), owner="a", state_class=OPTIMIZER, replaces=old)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    gate.set()
    waiting.join(TIMEOUT_S)
    assert found == [True]
    second.wait()
    assert not bench.store.await_room()  # nothing is on its way


def test_a_corrupted_block_is_found_and_names_path_offset_bytes_and_owner(
    make_bench: Any, directory: Path, noise: Noise, pages: Pages
) -> None:
    bench = make_bench(directory)
    block = put(bench, noise(MIB))
    file = bench.files[0]
    os.pwritev(file.fd, [pages(PAGE_NBYTES)], block.extent.offset_bytes + 64 * 1024)
    with pytest.raises(ChecksumError, match=r"layer\.3: 1\.0 MiB at offset") as caught:
        bench.store.read(block, pages(MIB)).wait()
    error = caught.value
    assert (error.path, error.offset_bytes) == (file.path, block.extent.offset_bytes)
    assert error.nbytes == MIB


def test_an_extent_is_kept_while_somebody_reads_it(
    make_bench: Any, tmp_path: Path, noise: Noise, pages: Pages
) -> None:
    gate, reading = threading.Event(), threading.Event()

    def held(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        reading.set()
        gate.wait(TIMEOUT_S)
        return os.preadv(fd, buffers, offset)

    bench = make_bench(tmp_path, backend=ThreadsBackend(preadv=held))
    sent, received = noise(MIB), pages(MIB)
    old = put(bench, sent)
    read = bench.store.read(old, received)
    assert reading.wait()
    new = put(bench, noise(MIB), replaces=old)
    third = put(bench, noise(MIB))
    assert old.extent not in (new.extent, third.extent)
    assert bench.tier.account.used_nbytes == 3 * MIB
    gate.set()
    read.wait()
    assert received == sent
    assert bench.tier.account.used_nbytes == 2 * MIB


def test_a_full_tier_is_an_error_at_once_and_harms_nothing(
    make_bench: Any, tmp_path: Path, noise: Noise, pages: Pages
) -> None:
    bench = make_bench(tmp_path, budget_nbytes=MIB)
    block = put(bench, noise(MIB))
    with pytest.raises(TierFullError, match=r"budget\.nvme"):
        put(bench, noise(PAGE_NBYTES), replaces=block)
    bench.store.read(block, pages(MIB)).wait()
    bench.store.free(block)


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(1, 256), min_size=2, max_size=8),
    writes=st.lists(st.integers(0, 7), max_size=40),
)
def test_blocks_replaced_at_random_keep_their_contents_and_the_books_balance(
    make_bench: Any, directory: Path, noise: Noise, pages: Pages,
    sizes: list[int], writes: list[int],
) -> None:  # fmt: skip
    bench = make_bench(directory, directory)
    contents = [noise(size * PAGE_NBYTES) for size in sizes]
    blocks = [put(bench, content) for content in contents]
    for start in range(0, len(writes), 3):  # three at a time
        chosen = {index % len(sizes) for index in writes[start : start + 3]}
        moves = {}
        for index in chosen:
            contents[index] = noise(sizes[index] * PAGE_NBYTES)
            moves[index] = bench.store.write(
                contents[index], owner=f"block {index}", state_class=OPTIMIZER,
                replaces=blocks[index],
            )  # fmt: skip
        for index, move in moves.items():
            blocks[index] = move.wait()
    for block, content in zip(blocks, contents, strict=True):
        received = pages(content.nbytes)
        bench.store.read(block, received).wait()
        assert received == content
        bench.store.free(block)
    assert bench.tier.account.used_nbytes == 0
    bench.ledger.check_integrity()
    assert len(bench.store._records) == 0


# ---- faults in the kernel, made by strace in a process of its own

_SCENARIO = """
import mmap, sys
from offload.swap.io.backends import open_backend
from offload.swap.io.block_store import BlockStore
from offload.swap.io.swap_file import SwapFile
from offload.tiers.errors import OffloadError
from offload.tiers.file_tier import FileTier
from offload.tiers.ledger import Ledger, StateClass

files = [SwapFile(sys.argv[1])]
store = BlockStore(files, FileTier(1 << 28, [1.0], Ledger()), open_backend(sys.argv[2]))
buffer = memoryview(mmap.mmap(-1, 1 << 20))
print("ready", flush=True)
for value in range(80):
    buffer[:] = bytes([value + 1]) * buffer.nbytes
    try:
        block = store.write(buffer, owner="x", state_class=StateClass.OPTIMIZER).wait()
        buffer[:] = bytes(buffer.nbytes)
        store.read(block, buffer).wait()
        print("same" if buffer == bytes([value + 1]) * buffer.nbytes else "DIFFERENT")
    except OffloadError as error:
        print(type(error).__name__, error.errno)
store.close()
print("closed")
"""


def run_with_fault(directory: Path, backend: str, calls: str, fault: str) -> list[str]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}"]
    command += ["-e", f"inject={calls}:{fault}", sys.executable, "-c", _SCENARIO]
    command += [str(directory), backend]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=False
    )
    if "ready" not in result.stdout:
        pytest.skip(f"strace cannot trace here: {result.stderr[-300:]}")
    assert result.returncode == 0, result.stderr
    _, *outcomes, last = result.stdout.splitlines()
    assert last == "closed"
    assert "DIFFERENT" not in outcomes
    return outcomes


# `when` counts per thread and leaves the probes of the main thread alone; `?` is for names that
# this kernel may not know
WRITES = "?pwritev,?pwritev2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "outcome"),
    [("error=EIO", "StorageError 5"), ("retval=1048576", "ChecksumError None")],
)
def test_a_write_that_the_kernel_refuses_or_only_claims_to_have_made_is_found(
    tmp_path: Path, fault: str, outcome: str
) -> None:
    """The next request works."""
    outcomes = run_with_fault(tmp_path, "threads", WRITES, f"{fault}:when=12+6")
    assert outcome in outcomes
    assert "same" in outcomes


# io_getevents does not know EAGAIN
@needs_libaio
@pytest.mark.parametrize(
    ("call", "error"), [("io_submit", "EAGAIN"), ("io_submit", "EINTR"), ("io_getevents", "EINTR")]
)
def test_libaio_survives_interrupted_and_refused_calls(
    tmp_path: Path, call: str, error: str
) -> None:
    outcomes = run_with_fault(tmp_path, "libaio", call, f"error={error}:when=3+3")
    assert set(outcomes) == {"same"}


@pytest.mark.parametrize("paths", [1, 2, 3])
def test_files_take_no_more_of_the_disk_than_the_budget(
    make_bench: Any, noise: Noise, tmp_path: Path, paths: int
) -> None:
    """Files grow in steps, here of 1 MiB."""
    nbytes = 3 * PAGE_NBYTES
    budget = 225 * nbytes + PAGE_NBYTES + 5
    bench = make_bench(*(tmp_path / str(path) for path in range(paths)), budget_nbytes=budget)
    source, count = noise(nbytes), 0

    def fill() -> None:
        nonlocal count
        while True:
            put(bench, source)
            count += 1

    with pytest.raises(TierFullError):
        fill()
    assert count >= 225 - paths + 1  # all of it: each further file may end in less than a block
    assert sum(os.fstat(file.fd).st_size for file in bench.files) <= budget
    # a file in many places also holds a block that says where, which is the file system's own
    own = len(bench.files) * PAGE_NBYTES
    assert sum(os.fstat(file.fd).st_blocks * 512 for file in bench.files) <= budget + own
