"""Swap files that cannot be made, reserved or closed, or of which the disk says nothing: an error
that says why, and nothing of the engine stays, or an engine that computes the same bits."""

import errno
import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.errors import OffloadError, StuckError
from offload.swap.io import pinned_folder, swap_file
from tests.aio import IO_BACKENDS
from tests.offload.engine_cases import NVME, TinyLM, batches, config, losses_of, seeded
from tests.stuck_calls import TIMEOUT_THREAD, all_ended, give_up_this_call

DATA = batches(2)
CALLS = (
    "open", "close", "fstat", "statvfs", "ftruncate", "mkdir", "unlink", "rmdir", "dup",
    "pwritev", "preadv",
)  # fmt: skip
STUCK = 0  # no number: the call does not return
RELEASE_S = 60.0
NUMBERS = (
    STUCK, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EMFILE, errno.EOPNOTSUPP,
)  # fmt: skip


class FaultyOS:
    """`os`, of which one call fails, or does not return until `release`."""

    def __init__(self, *, has_tmpfile: bool = True) -> None:
        self.has_tmpfile = has_tmpfile  # else a file has a name for an instant
        self.seen: Counter[str] = Counter()
        self.plan = ("", -1, 0)  # which call, its number, how
        self.hit = ""
        self._released = threading.Event()

    def release(self) -> None:
        """Stuck calls return; what they left has been cleared up when this returns."""
        self._released.set()
        assert all_ended()

    def _hold(self) -> None:
        """Block as a call that does not return, until its waiter has given it up."""
        is_patient = threading.current_thread().name == TIMEOUT_THREAD
        assert is_patient, f"{self.hit} would be waited for without an end"
        give_up_this_call()
        assert self._released.wait(RELEASE_S)

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self.watched(name, real) if name in CALLS else real

    def watched(self, name: str, real: Any) -> Any:
        def call(*args: Any, **keys: Any) -> Any:
            if name == "open" and not self.has_tmpfile and args[0] == ".":
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            number = self.seen[name]
            self.seen[name] += 1
            if self.plan[:2] == (name, number):
                if self.plan[2] == STUCK:
                    self.hit = f"{name} {number} is stuck"
                    self._hold()
                    return real(*args, **keys)
                if name == "close":  # it is closed all the same
                    real(*args, **keys)
                self.hit = f"{errno.errorcode[self.plan[2]]} of {name} {number}"
                raise OSError(self.plan[2], os.strerror(self.plan[2]))
            return real(*args, **keys)

        return call

    @contextmanager
    def installed(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for module in (swap_file, pinned_folder):
                patch.setattr(module, "os", self)
            patch.setattr(swap_file, "fallocate", self.watched("fallocate", swap_file.fallocate))
            yield


def held() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def life(folder: Path, backend: str, calls: FaultyOS) -> tuple[list[float], OffloadError | None]:
    """An engine, its losses, and the error that ended it."""
    keys = config(folder, NVME)
    keys["nvme"]["backend"] = backend
    model = seeded(TinyLM)  # of the same first values each time
    losses: list[float] = []
    try:
        with calls.installed(), offload.initialize(model, keys) as engine:
            losses = losses_of(engine, DATA)
    except OffloadError as error:
        return losses, error
    return losses, None


def calls_of(calls: FaultyOS) -> list[tuple[str, int]]:
    return [(name, number) for name, count in calls.seen.items() for number in range(count)]


@pytest.mark.parametrize("backend", IO_BACKENDS)
def test_any_call_that_fails_is_an_error_that_leaves_nothing_or_changes_no_bit(
    tmp_path: Path, backend: str, long: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, named = FaultyOS(), FaultyOS(has_tmpfile=False)
    expected, error = life(tmp_path, backend, calls)
    assert error is None
    assert life(tmp_path, backend, named) == (expected, None)
    draw, before = random.Random(0), held()
    faults: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    cases = [(True, name, n, code) for name, n in calls_of(calls) for code in NUMBERS]
    cases += [(False, name, n, STUCK) for name, n in calls_of(named)]
    for has_tmpfile, name, number, code in cases if long else draw.sample(cases, 12):
        calls = FaultyOS(has_tmpfile=has_tmpfile)
        calls.plan = name, number, code
        losses, error = life(tmp_path, backend, calls)
        assert calls.hit
        if code == STUCK and error is not None:
            assert isinstance(error, StuckError), calls.hit
        calls.release()
        assert losses in ([], expected), calls.hit
        assert losses or error is not None, calls.hit
        if error is not None:
            assert str(tmp_path) in str(error), calls.hit
            errors[name] += 1
        faults[name] += 1
        del error
        now = held()
        assert all(n <= then for n, then in zip(now, before, strict=True)), calls.hit
        assert os.listdir(tmp_path) == [], calls.hit
    if long:
        with capsys.disabled():
            print(f"\n{backend}: {faults.total()} faults, {errors.total()} errors; {dict(faults)}")


def test_a_reservation_that_is_stuck_ends_with_a_warning_and_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released, real, before = threading.Event(), swap_file.fallocate, held()

    def stuck(*args: Any) -> None:
        assert released.wait(RELEASE_S)
        real(*args)

    monkeypatch.setattr(swap_file, "fallocate", stuck)
    keys = config(tmp_path, NVME)
    keys["nvme"]["timeout_s"] = 1.0
    try:
        with pytest.raises(StuckError) as caught:
            offload.initialize(seeded(TinyLM), keys)
    finally:
        released.set()
    assert str(caught.value).startswith("reserving ")
    assert f"for {tmp_path}/<swap file> has not ended for 1" in str(caught.value)
    assert 1 <= caught.value.seconds < RELEASE_S
    assert "not ended for" in caplog.text
    assert "an error after 1 s (nvme.timeout_s)" in caplog.text
    del caught
    until = time.monotonic() + RELEASE_S
    while any(n > then for n, then in zip(held(), before, strict=True)):
        assert time.monotonic() < until
        time.sleep(0.01)
