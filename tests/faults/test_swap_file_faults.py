"""Swap files that cannot be made, reserved or closed: an error that says why, and nothing of the
engine stays, or an engine that computes the same bits."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.errors import OffloadError
from offload.swap import pinned_folder, swap_file
from tests.aio import IO_BACKENDS
from tests.offload.engine_cases import NVME, TinyLM, batches, config, losses_of, seeded

DATA = batches(2)
CALLS = (
    "open", "close", "fstat", "statvfs", "ftruncate", "mkdir", "unlink", "rmdir", "dup",
    "pwritev", "preadv",
)  # fmt: skip
NUMBERS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EMFILE, errno.EOPNOTSUPP)


class FaultyOS:
    """`os`, of which one call fails."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.plan = ("", -1, 0)  # which call, its number, how
        self.hit = ""

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self.watched(name, real) if name in CALLS else real

    def watched(self, name: str, real: Any) -> Any:
        def call(*args: Any, **keys: Any) -> Any:
            number = self.seen[name]
            self.seen[name] += 1
            if self.plan[:2] == (name, number):
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
            patch.setattr(swap_file, "_fallocate", self.watched("fallocate", swap_file._fallocate))
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


@pytest.mark.parametrize("backend", IO_BACKENDS)
def test_any_call_that_fails_is_an_error_that_leaves_nothing_or_changes_no_bit(
    tmp_path: Path, backend: str, long: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = FaultyOS()
    expected, error = life(tmp_path, backend, calls)
    assert error is None
    counts, draw, before = dict(calls.seen), random.Random(0), held()
    faults: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    cases = [(name, n, code) for name in counts for n in range(counts[name]) for code in NUMBERS]
    for name, number, code in cases if long else draw.sample(cases, 12):
        calls = FaultyOS()
        calls.plan = name, number, code
        losses, error = life(tmp_path, backend, calls)
        assert calls.hit
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
