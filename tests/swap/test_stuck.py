"""A device that does not answer. Time is what the test says it is: it looks itself."""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.swap.io.backends import open_backend
from offload.swap.io.io_backend import IOBackend
from offload.swap.io.io_watch import LOOKS
from offload.swap.io.requests_and_retries import Operation
from offload.swap.io.swap_file import SwapFile
from offload.swap.threads.transfer import Transfer, all_of
from offload.tiers.errors import StorageError, StuckError, TierFullError
from offload.tiers.ledger import StateClass
from offload.tiers.tier import PAGE_NBYTES
from tests.aio import IO_BACKENDS
from tests.swap.test_cached_file_state import make_bench as make_slots

Noise = Callable[[int], memoryview]
Pages = Callable[..., memoryview]
TIMEOUT_S = 30.0
NEVER_S = 1e6  # the backend's own thread does not look


class Device:
    """Calls at `held` offsets do not return until `release`. Thread-safe."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.calls: list[int] = []
        self.entered = threading.Semaphore(0)
        self._go_on = threading.Event()
        self._lock = threading.Condition()
        self._inside = 0

    def call(self, offset: int, real: Callable[[bool], Any]) -> Any:
        """`real`, and whether it was held, which blocks."""
        self.calls.append(offset)
        if offset not in self.held:
            return real(False)
        with self._lock:
            self._inside += 1
        self.entered.release()
        assert self._go_on.wait(TIMEOUT_S)
        try:
            return real(True)
        finally:
            with self._lock:
                self._inside -= 1
                self._lock.notify_all()

    def await_entered(self) -> None:
        assert self.entered.acquire(timeout=TIMEOUT_S)

    def release(self) -> None:
        """All return, and have when this does."""
        self._go_on.set()
        with self._lock:
            assert self._lock.wait_for(lambda: not self._inside, TIMEOUT_S)


def backend_with(device: Device, name: str = "threads", **options: Any) -> IOBackend:
    """Its calls go through `device`."""

    def on(call: Callable[..., int]) -> Callable[..., int]:
        def held(fd: int, buffers: Any, offset: int) -> int:
            def real(late: bool) -> int:  # a late one moves a part alone
                return call(fd, [buffers[0][:PAGE_NBYTES]] if late else buffers, offset)

            return int(device.call(offset, real))

        return held

    backend: Any = open_backend(name, timeout_s=NEVER_S, **options)
    backend._calls = {operation: on(call) for operation, call in backend._calls.items()}
    return backend  # type: ignore[no-any-return]


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.release()


Make = Callable[..., IOBackend]


@pytest.fixture(params=IO_BACKENDS)
def make(request: pytest.FixtureRequest, device: Device) -> Iterator[Make]:
    made: list[IOBackend] = []

    def make_backend(**options: Any) -> IOBackend:
        made.append(backend_with(device, request.param, **options))
        return made[-1]

    yield make_backend
    device.release()
    for backend in made:
        backend.close()


@pytest.fixture
def file(tmp_path: Path, device: Device) -> Iterator[SwapFile]:
    with SwapFile(tmp_path) as file:
        file.reserve(16 << 20)
        yield file
        device.release()


def look(backend: IOBackend, times: int = LOOKS + 1) -> None:
    for _ in range(times):
        backend.watch.look()


def hold(
    backend: IOBackend, device: Device, file: SwapFile, buffer: memoryview, offset: int = 0,
    *, write: bool = False,
) -> Transfer[Any]:  # fmt: skip
    """A transfer that is in the device now, and stays there."""
    device.held.add(offset)
    operation = Operation.WRITE if write else Operation.READ
    moved = backend.submit(operation, file.fd, buffer, offset, path="/swap", owner="layer.3")
    device.await_entered()
    return moved


@pytest.mark.parametrize("write", [False, True])
def test_what_is_stuck_is_an_error_that_says_what_where_and_how_long(
    make: Make, device: Device, file: SwapFile, pages: Pages, write: bool
) -> None:
    backend = make()
    moved = hold(backend, device, file, pages(2 * PAGE_NBYTES), 1 << 20, write=write)
    look(backend, LOOKS - 1)
    assert not moved.done()
    look(backend, 2)
    operation = "write" if write else "read"
    said = rf"{operation} of 8\.0 KiB at offset 1048576 of /swap \(layer\.3\) has not ended for"
    with pytest.raises(StuckError, match=said) as caught:
        moved.wait()
    error = caught.value
    assert (error.path, error.offset_bytes, error.nbytes) == ("/swap", 1 << 20, 2 * PAGE_NBYTES)
    assert error.seconds > 0
    assert "nvme.timeout_s" in str(error)
    assert isinstance(error, StorageError)


def test_what_waits_behind_it_and_what_comes_later_fails_with_the_same_error(
    make: Make, device: Device, file: SwapFile, pages: Pages
) -> None:
    backend = make(workers=1)
    first = hold(backend, device, file, pages(PAGE_NBYTES))
    begun: list[int] = []
    behind = [
        backend.submit(
            Operation.WRITE,
            file.fd,
            pages(PAGE_NBYTES),
            offset << 20,
            path=path,
            before=lambda: begun.append(1),
        )
        for offset, path in ((1, "/swap"), (2, "/other"))
    ]
    look(backend)
    later = backend.submit(Operation.READ, file.fd, pages(PAGE_NBYTES), 3 << 20, path="/other")
    errors = []
    for moved in (first, *behind, later):
        with pytest.raises(StuckError) as caught:
            moved.wait()
        errors.append(caught.value)
    assert all(error is errors[0] for error in errors)
    assert "/swap" in str(errors[0])
    assert "requests behind them: 2" in str(errors[0])
    with pytest.raises(StuckError) as together:
        all_of([first, *behind, later]).wait()
    assert not getattr(together.value, "__notes__", [])  # said once
    backend.close()
    assert not begun
    assert device.calls == [0]


def test_closing_does_not_wait_for_it_and_leaves_the_descriptor_open(
    make: Make, device: Device, file: SwapFile, pages: Pages
) -> None:
    backend = make()
    moved = hold(backend, device, file, pages(PAGE_NBYTES))
    closing = threading.Thread(target=backend.close)
    closing.start()
    while not moved.done():  # as its own thread would, while `close` waits
        look(backend, 1)
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert backend.is_lost(file.fd)


def test_while_anything_ends_nothing_is_given_up(
    make: Make, device: Device, file: SwapFile, pages: Pages
) -> None:
    backend = make()
    slow = hold(backend, device, file, pages(PAGE_NBYTES))
    for number in range(1, 4):
        look(backend, LOOKS - 1)
        backend.submit(
            Operation.READ, file.fd, pages(PAGE_NBYTES), number << 20, path="/swap"
        ).wait()
    look(backend, LOOKS - 1)
    assert not slow.done()
    device.release()
    slow.wait()


def test_what_returns_too_late_changes_nothing_any_more(
    make: Make, device: Device, file: SwapFile, pages: Pages
) -> None:
    backend = make()
    moved = hold(backend, device, file, pages(1 << 20), 1 << 20, write=True)
    look(backend)
    device.release()
    for _ in itertools.takewhile(lambda _: backend.is_lost(file.fd), itertools.count()):
        threading.Event().wait(0.001)
    with pytest.raises(StuckError):
        moved.wait()
    # nothing goes on with the rest: the file may be another one by then
    assert device.calls == [1 << 20]


# ---------------------------------------------------------------- what stands on it
def test_a_wait_for_room_in_the_tier_ends(
    make: Make, device: Device, tmp_path: Path, noise: Noise, make_bench: Any
) -> None:
    backend = make()
    bench = make_bench(tmp_path, backend=backend)
    device.held.add(0)
    write = bench.store.write(noise(PAGE_NBYTES), owner="a", state_class=StateClass.OPTIMIZER)
    device.await_entered()
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(bench.store.await_room()))
    waiting.start()
    while not write.done():
        look(backend, 1)
    waiting.join(TIMEOUT_S)
    assert found in ([True], [False])  # the extent came back, before it waited or after
    with pytest.raises(StuckError, match=r"\(a\)"):
        write.wait()
    fd = bench.files[0].fd
    bench.store.close()
    os.fstat(fd)  # open: a file that is opened now must not get its number
    device.release()  # it is closed with the bench, if by then the call has returned


def test_memory_that_a_late_read_may_fill_is_not_used_again(device: Device, tmp_path: Path) -> None:
    backend = backend_with(device)
    for bench in make_slots(tmp_path, backend, slots=2):
        lost, *others = (bench.filled(name, 1) for name in "abc")
        device.held.add(lost._file._blocks[0].extent.offset_bytes)
        lost.prefetch(next_use=None)
        device.await_entered()
        look(backend)
        with pytest.raises(StuckError, match=r"\(a\)"):
            lost.tensor()
        state = bench.state("d")
        view = state.blank()  # in the place of a copy that can go
        view.fill_(9)
        with bench.pool.lock:
            if lost.slot.can_evict():
                lost.slot.evict()
        with pytest.raises(TierFullError):
            bench.pool.demand(PAGE_NBYTES, "e", StateClass.PARAMETERS)
        assert not any(other.slot.held_nbytes for other in others)
        device.release()
        assert view.unique().tolist() == [9]
        bench.ledger.check_integrity()
