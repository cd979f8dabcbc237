"""One conformance class; every backend, and every kind of file, passes all of it."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.swap.io.backends import open_backend, probe_backends
from offload.swap.io.io_backend import IOBackend, Priority
from offload.swap.io.requests_and_retries import MAX_RETRIES, Operation
from offload.swap.io.swap_file import SwapFile
from offload.swap.io.threads_backend import ThreadsBackend
from offload.swap.threads.transfer import Transfer, all_of
from offload.tiers.errors import (
    ChecksumError,
    NoSpaceError,
    StateError,
    StorageError,
    UnsupportedError,
)
from offload.tiers.tier import PAGE_NBYTES
from tests.aio import needs_libaio, refuse_o_direct

Noise = Callable[[int], memoryview]
Pages = Callable[..., memoryview]
TIMEOUT_S = 30.0


@pytest.fixture
def file(directory: Path) -> Iterator[SwapFile]:
    with SwapFile(directory) as file:
        file.reserve(64 << 20)
        yield file


class BackendConformance:
    """What every backend owes. Subclasses say how to make one, and on which files."""

    direct = True
    backend_name = "threads"

    def make(self, **options: Any) -> IOBackend:
        return open_backend(self.backend_name, **options)

    @pytest.fixture(autouse=True)
    def kind_of_files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if not self.direct:
            refuse_o_direct(monkeypatch)

    @pytest.fixture
    def backend(self, file: SwapFile) -> Iterator[IOBackend]:
        backend = self.make(io_block_nbytes=1 << 20)
        yield backend
        backend.close()

    def test_what_is_written_is_read(
        self, backend: IOBackend, file: SwapFile, noise: Noise, pages: Pages
    ) -> None:
        sent, received = noise(8 << 20), pages(8 << 20)  # eight pieces each
        backend.submit(Operation.WRITE, file.fd, sent, PAGE_NBYTES, path="p").wait()
        backend.submit(Operation.READ, file.fd, received, PAGE_NBYTES, path="p").wait()
        assert received == sent

    def test_the_end_of_the_file_is_an_error_that_says_where(
        self, backend: IOBackend, file: SwapFile, pages: Pages
    ) -> None:
        beyond = file.nbytes - PAGE_NBYTES
        with pytest.raises(StorageError, match=r"file ends 4\.0 KiB too early") as caught:
            backend.submit(Operation.READ, file.fd, pages(2 * PAGE_NBYTES), beyond, path="p").wait()
        assert (caught.value.path, caught.value.offset_bytes) == ("p", beyond)
        assert caught.value.nbytes == 2 * PAGE_NBYTES

    def test_an_error_of_the_kernel_is_raised_at_wait_with_its_cause(
        self, backend: IOBackend, pages: Pages, tmp_path: Path
    ) -> None:
        fd = os.open(path := str(tmp_path / "write-only"), os.O_WRONLY | os.O_CREAT)
        said = r"read of 8\.0 KiB at offset 4096.*write-only failed: EBADF"
        try:
            transfer = backend.submit(Operation.READ, fd, pages(8192), 4096, path=path)
            with pytest.raises(StorageError, match=said) as caught:
                transfer.wait()
        finally:
            os.close(fd)
        error = caught.value
        assert (error.path, error.offset_bytes, error.nbytes) == (path, 4096, 8192)
        assert error.errno == errno.EBADF
        assert isinstance(error.__cause__, OSError)

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_an_error_in_before_or_after_is_raised_at_wait(
        self, backend: IOBackend, file: SwapFile, pages: Pages, when: str
    ) -> None:
        def own() -> None:
            raise ChecksumError("not what was written")

        def foreign() -> None:
            raise SystemExit(3)  # not even this may end a worker

        def submit(**hook: Callable[[], None]) -> Transfer[None]:
            before, after = hook.get("before"), hook.get("after")
            return backend.submit(
                Operation.WRITE, file.fd, pages(2 << 20), 0, path="p", before=before, after=after
            )

        with pytest.raises(ChecksumError):
            submit(**{when: own}).wait()
        with pytest.raises(StorageError) as caught:
            submit(**{when: foreign}).wait()
        assert isinstance(caught.value.__cause__, SystemExit)
        submit().wait()

    def test_close_finishes_what_is_in_flight(
        self, directory: Path, noise: Noise, pages: Pages, no_leak: None
    ) -> None:
        with SwapFile(directory) as file:
            file.reserve(8 << 20)
            backend = self.make()
            transfer = backend.submit(Operation.WRITE, file.fd, noise(8 << 20), 0, path="p")
            end = file.nbytes  # of which a read fails
            backend.submit(Operation.READ, file.fd, pages(PAGE_NBYTES), end, path="p")
            backend.close()
            assert transfer.done()
            backend.close()
            with pytest.raises(StateError, match="closed"):
                backend.submit(Operation.READ, file.fd, pages(PAGE_NBYTES), 0, path="p")

    @settings(
        max_examples=8, deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )  # fmt: skip
    @given(sizes=st.lists(st.integers(1, 600), min_size=1, max_size=24), seed=st.randoms())
    def test_many_concurrent_requests_of_any_size_do_not_mix(
        self, backend: IOBackend, file: SwapFile, noise: Noise, pages: Pages,
        sizes: list[int], seed: Any,
    ) -> None:  # fmt: skip
        sent = [noise(size * PAGE_NBYTES) for size in sizes]
        offsets = [sum(sizes[:index]) * PAGE_NBYTES for index in range(len(sizes))]
        priorities = [seed.choice(list(Priority)) for _ in sizes]
        writes = [
            backend.submit(Operation.WRITE, file.fd, source, offset, path="p", priority=priority)
            for source, offset, priority in zip(sent, offsets, priorities, strict=True)
        ]
        all_of(writes).wait()
        received = [pages(source.nbytes) for source in sent]
        order = list(range(len(sizes)))
        seed.shuffle(order)
        reads = [
            backend.submit(Operation.READ, file.fd, received[i], offsets[i], path="p")
            for i in order
        ]
        all_of(reads).wait()
        assert received == sent

    def test_urgent_requests_are_served_first_and_equals_in_order(
        self, file: SwapFile, pages: Pages
    ) -> None:
        served: list[str] = []
        gate, entered = threading.Event(), threading.Event()

        def hold() -> None:
            entered.set()
            gate.wait(TIMEOUT_S)

        def submit(backend: IOBackend, name: str, priority: Priority) -> Any:
            return backend.submit(
                Operation.WRITE, file.fd, pages(PAGE_NBYTES), 0, path="p", priority=priority,
                before=lambda: served.append(name),
            )  # fmt: skip

        with self.make(workers=1) as backend:
            held = backend.submit(
                Operation.WRITE, file.fd, pages(PAGE_NBYTES), 0, path="p", before=hold
            )
            assert entered.wait(TIMEOUT_S)
            moves = [
                submit(backend, "background", Priority.BACKGROUND),
                submit(backend, "normal 1", Priority.NORMAL),
                submit(backend, "normal 2", Priority.NORMAL),
                submit(backend, "urgent", Priority.URGENT),
            ]
            gate.set()
            all_of([held, *moves]).wait()
        assert served == ["urgent", "normal 1", "normal 2", "background"]

    def test_a_forked_child_is_refused_instead_of_hanging(
        self, backend: IOBackend, pages: Pages, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backend, "_pid", -1)
        with pytest.raises(StateError, match="after fork"):
            backend.submit(Operation.READ, 0, pages(PAGE_NBYTES), 0, path="p")
        monkeypatch.undo()


class TestThreads(BackendConformance):
    pass


class TestThreadsBuffered(BackendConformance):
    direct = False

    def test_any_length_at_any_offset_will_do(
        self, backend: IOBackend, file: SwapFile, noise: Noise
    ) -> None:
        sent, received = noise(1 << 20)[3:70003], memoryview(bytearray(70000))
        backend.submit(Operation.WRITE, file.fd, sent, 17, path="p").wait()
        backend.submit(Operation.READ, file.fd, received, 17, path="p").wait()
        assert received == sent


@needs_libaio
class TestLibaio(BackendConformance):
    backend_name = "libaio"


@needs_libaio
class TestLibaioBuffered(BackendConformance):
    backend_name = "libaio"
    direct = False


# ---- what only threads can be made to do: their system calls are passed in

Call = Callable[[int, Sequence[memoryview], int], int]


def short_by(share: float, call: Call) -> Call:
    """Move only a part of what is asked, whole pages of it."""

    def shortened(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        (buffer,) = buffers
        part = max(int(buffer.nbytes * share) // PAGE_NBYTES, 1) * PAGE_NBYTES
        return call(fd, [buffer[:part]], offset)

    return shortened


def raising(numbers: list[int], call: Call) -> Call:
    """Raise these errors first, then work."""

    def faulty(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if numbers:
            number = numbers.pop(0)
            raise OSError(number, os.strerror(number))
        return call(fd, buffers, offset)

    return faulty


def ragged(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """A short read after which O_DIRECT would refuse to go on from the middle of a page."""
    assert offset % PAGE_NBYTES == 0
    count = os.preadv(fd, buffers, offset)
    return count - 100 if count > PAGE_NBYTES else count


@pytest.mark.parametrize("preadv", [short_by(0.3, os.preadv), ragged], ids=["pages", "ragged"])
def test_short_reads_and_writes_are_completed(
    file: SwapFile, noise: Noise, pages: Pages, preadv: Call
) -> None:
    sent, received = noise(4 << 20), pages(4 << 20)
    with ThreadsBackend(preadv=preadv, pwritev=short_by(0.6, os.pwritev)) as backend:
        backend.submit(Operation.WRITE, file.fd, sent, 0, path="p").wait()
        backend.submit(Operation.READ, file.fd, received, 0, path="p").wait()
    assert received == sent


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_interrupted_and_refused_calls_are_retried(
    file: SwapFile, noise: Noise, number: int
) -> None:
    with ThreadsBackend(pwritev=raising([number] * 4, os.pwritev)) as backend:
        backend.submit(Operation.WRITE, file.fd, noise(1 << 20), 0, path="p").wait()


def test_retries_are_bounded(file: SwapFile, noise: Noise) -> None:
    faults = [errno.EAGAIN] * (MAX_RETRIES + 1)
    with ThreadsBackend(pwritev=raising(faults, os.pwritev)) as backend:
        write = backend.submit(Operation.WRITE, file.fd, noise(PAGE_NBYTES), 0, path="p")
        with pytest.raises(StorageError, match="EAGAIN") as caught:
            write.wait()
    assert caught.value.errno == errno.EAGAIN


def test_a_full_device_is_a_no_space_error(pages: Pages) -> None:
    with ThreadsBackend() as backend, open("/dev/full", "r+b", buffering=0) as full:
        write = backend.submit(Operation.WRITE, full.fileno(), pages(PAGE_NBYTES), 0, path="p")
        with pytest.raises(NoSpaceError, match=r"budget\.nvme") as caught:
            write.wait()
    assert caught.value.errno == errno.ENOSPC


def test_after_an_error_the_other_pieces_are_skipped_and_none_moves_later(
    file: SwapFile, noise: Noise
) -> None:
    calls: list[int] = []

    def counting(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(offset)
        raise OSError(errno.EIO, "gone")

    with ThreadsBackend(workers=1, io_block_nbytes=1 << 20, pwritev=counting) as backend:
        with pytest.raises(StorageError):
            backend.submit(Operation.WRITE, file.fd, noise(8 << 20), 0, path="p").wait()
        assert calls == [0]


# ---- the registry


def test_a_missing_package_is_a_reason_and_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "libaio", None)  # import raises ImportError
    reports = {report.name: report for report in probe_backends(tmp_path)}
    assert not reports["libaio"].available
    assert "offload[aio]" in reports["libaio"].reason
    with pytest.raises(UnsupportedError, match="threads"):
        open_backend("libaio")
