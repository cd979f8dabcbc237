"""Speeds are measured once per machine, kept whole or not at all, and read without torch."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offload.planning.machine import calibration
from offload.planning.machine.calibration import known_speeds, machine_speeds
from offload.planning.machine.disk_cache import digest_of
from offload.planning.machine.speeds import ComputeSpeeds, DiskSpeeds
from offload.swap.io.swap_file import SwapFile
from offload.swap.io.threads_backend import ThreadsBackend
from offload.tiers.errors import PathError

COMPUTE: dict[str, Any] = {
    "gpu": False,
    "matmul_flops_per_s": {"fp32": 1e11, "bf16": 3e11},
    "compute_bytes_per_s": 2e10,
    "compute_bytes_per_s_in": {"fp32": 2e10, "bf16": 1e10},
    "operation_s": 1e-5,
    "host_bytes_per_s": 5e10,
    "optimizer_parameters_per_s": {"fp32": 2e9},
    "optimizer_lost_share": 0.9,
    "host_to_device_bytes_per_s": 0.0,
    "device_to_host_bytes_per_s": 0.0,
}
DISK: dict[str, Any] = {
    "nvme_read_bytes_per_s": 1e9,
    "nvme_write_bytes_per_s": 2e9,
    "nvme_mixed_bytes_per_s": 1.5e9,
    "io_lost_s_per_byte": 1e-10,
    "update_disk_share": 0.8,
}


class Counted:
    """Stands in for the measurements."""

    def __init__(self) -> None:
        self.compute = self.disk = 0

    def measure_compute(self) -> ComputeSpeeds:
        self.compute += 1
        return ComputeSpeeds(**{**COMPUTE, "operation_s": 1e-5 * self.compute})

    def measure_disk(self, folders: object, gpu: bool) -> DiskSpeeds:
        self.disk += 1
        return DiskSpeeds(**DISK)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counted:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = Counted()
    monkeypatch.setattr(calibration, "_measure_compute", found.measure_compute)
    monkeypatch.setattr(calibration, "_measure_disk", found.measure_disk)
    return found


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "offload" / "speeds").iterdir())


def test_a_machine_is_measured_once(counted: Counted, tmp_path: Path) -> None:
    assert known_speeds([tmp_path]) is None
    first = machine_speeds([tmp_path])
    assert machine_speeds([tmp_path]) == known_speeds([tmp_path]) == first
    assert (counted.compute, counted.disk) == (1, 1)
    assert first.nvme_read_bytes_per_s == 1e9
    assert first.matmul_flops_per_s["bf16"] == 3e11


def test_remeasuring_replaces_what_was_kept(counted: Counted, tmp_path: Path) -> None:
    first = machine_speeds([tmp_path])
    second = machine_speeds([tmp_path], remeasure=True)
    assert second.operation_s == 2 * first.operation_s
    assert known_speeds([tmp_path]) == second
    assert len(kept(tmp_path)) == 2


def test_another_file_system_is_measured_and_compute_is_not_again(
    counted: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_speeds([tmp_path])
    real = calibration._disk_key
    monkeypatch.setattr(
        calibration, "_disk_key", lambda folders: {**real(folders), "file systems": ["another"]}
    )
    assert known_speeds([tmp_path]) is None
    machine_speeds([tmp_path])
    assert (counted.compute, counted.disk) == (1, 2)


def test_another_version_of_torch_is_another_machine(
    counted: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_speeds([tmp_path])
    monkeypatch.setattr(calibration.machine, "version_of", lambda name: "0.0")
    assert known_speeds([tmp_path]) is None


@pytest.mark.parametrize("damage", ["", "[]", '{"key": {}, "speeds": {}}', "\x00\xff"])
def test_damaged_files_count_as_not_there(counted: Counted, tmp_path: Path, damage: str) -> None:
    machine_speeds([tmp_path])
    for file in kept(tmp_path):
        file.write_text(damage)
    assert known_speeds([tmp_path]) is None
    machine_speeds([tmp_path])
    assert known_speeds([tmp_path]) is not None


def change(file: Path, name: str, otherwise: str, value: object) -> None:
    """Another number in a file that is whole: `otherwise`, where it has no `name`."""
    answer = json.loads(file.read_text())["answer"]
    answer[name if name in answer else otherwise] = value
    file.write_text(json.dumps({"answer": answer, "digest": digest_of(answer)}))


@pytest.mark.parametrize("value", ["fast", None, -1.0, float("inf"), True])
def test_numbers_that_are_none_are_not_believed(
    counted: Counted, tmp_path: Path, value: object
) -> None:
    machine_speeds([tmp_path])
    for file in kept(tmp_path):
        change(file, "nvme_read_bytes_per_s", "host_bytes_per_s", value)
    assert known_speeds([tmp_path]) is None


def test_where_nothing_can_be_kept_the_measurement_is_used_and_that_is_said(
    counted: Counted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, logger="offload"):
        found = machine_speeds([tmp_path])
    assert found.nvme_write_bytes_per_s == 2e9
    assert "cannot be kept" in caplog.text
    assert "XDG_CACHE_HOME" in caplog.text


def test_a_machine_that_others_use_is_measured_with_a_warning(
    counted: Counted, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(calibration.psutil, "cpu_percent", lambda interval: 90.0)
    with caplog.at_level(logging.WARNING, logger="offload"):
        machine_speeds([tmp_path])
    assert "other programs take 90 % of this machine's cores" in caplog.text
    assert counted.compute == 1


def test_a_folder_on_a_drive_that_is_not_there_is_refused(counted: Counted, tmp_path: Path) -> None:
    missing = tmp_path / "drive" / "offload"
    assert known_speeds([missing]) is None
    with pytest.raises(PathError, match="is the drive mounted"):
        machine_speeds([missing])
    assert counted.disk == 0


def test_what_was_measured_is_read_without_torch(counted: Counted, tmp_path: Path) -> None:
    machine_speeds([tmp_path])
    program = (
        "import sys\n"
        "from offload.planning.machine.calibration import known_speeds\n"
        f"assert known_speeds([{str(tmp_path)!r}]).nvme_read_bytes_per_s == 1e9\n"
        "heavy = {'torch', 'numba'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# ---------------------------------------------------------------- the measurements themselves
def test_a_disk_is_measured_in_both_directions(tmp_path: Path) -> None:
    from offload.planning.machine.speed_tests import measure_disk

    before = set(tmp_path.iterdir())
    found = measure_disk([tmp_path], beside_compute=False, file_nbytes=32 << 20)
    assert min(found.nvme_read_bytes_per_s, found.nvme_write_bytes_per_s) > 0
    assert found.nvme_mixed_bytes_per_s > 0
    assert (found.io_lost_s_per_byte, found.update_disk_share) == (0, 1)  # nothing beside it
    assert set(tmp_path.iterdir()) == before


class Calls:
    """The calls of a disk that allows `burst_nbytes` at once and `bytes_per_s` from then on."""

    def __init__(self, burst_nbytes: float = math.inf, bytes_per_s: float = math.inf) -> None:
        self.done: list[tuple[str, int, int]] = []  # direction, offset, bytes
        self._left, self._rate = burst_nbytes, bytes_per_s
        self._lock = threading.Lock()

    def backend(self) -> ThreadsBackend:
        return ThreadsBackend(preadv=self.preadv, pwritev=self.pwritev)

    def preadv(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        self._wait("r", parts, offset)
        return os.preadv(fd, parts, offset)

    def pwritev(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        self._wait("w", parts, offset)
        return os.pwritev(fd, parts, offset)

    def _wait(self, direction: str, parts: Sequence[memoryview], offset: int) -> None:
        nbytes = sum(part.nbytes for part in parts)
        with self._lock:
            self.done.append((direction, offset, nbytes))
            self._left -= nbytes
            if self._left < 0:
                time.sleep(nbytes / self._rate)


def disk_of(calls: Calls, monkeypatch: pytest.MonkeyPatch, folder: Path, mib: int) -> DiskSpeeds:
    from offload.planning.machine import speed_tests

    monkeypatch.setattr(speed_tests, "open_backend", calls.backend)
    return speed_tests.measure_disk([folder], beside_compute=False, file_nbytes=mib << 20)


def test_a_disk_that_is_throttled_after_a_while_is_measured_as_it_is_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = disk_of(Calls(64 << 20, 1e9), monkeypatch, tmp_path, 96)
    rates = (
        found.nvme_read_bytes_per_s, found.nvme_write_bytes_per_s, found.nvme_mixed_bytes_per_s,
    )  # fmt: skip
    assert max(rates) <= 1e9


def test_a_slow_disk_is_measured_with_less_of_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from offload.planning.machine import speed_tests

    monkeypatch.setattr(speed_tests, "_FILL_S", 0.05)
    monkeypatch.setattr(speed_tests, "_PART_S", 0.02)
    calls = Calls(0, 1e9)
    found = disk_of(calls, monkeypatch, tmp_path, 1024)
    assert found.nvme_mixed_bytes_per_s <= 1e9
    assert sum(nbytes for _, _, nbytes in calls.done) < 1 << 30


def test_what_is_read_was_written_long_before_and_writes_are_bounded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from offload.planning.machine import speed_tests

    block, file_nbytes = 1 << 20, 96 << 20
    monkeypatch.setattr(speed_tests, "_BLOCK_NBYTES", block)
    monkeypatch.setattr(speed_tests, "_IN_FLIGHT_NBYTES", 4 * block)
    calls = Calls()
    disk_of(calls, monkeypatch, tmp_path, 96)
    moves = [(how, offset) for how, offset, nbytes in calls.done if nbytes == block]
    written: list[int] = []
    for direction, offset in moves:
        if direction == "w":
            written.append(offset)
        else:
            assert offset in written
            since = len(written) - max(i for i, each in enumerate(written) if each == offset)
            assert since * block > file_nbytes / 3
    assert 2.5 * file_nbytes < len(written) * block <= 3 * file_nbytes


def test_a_file_that_lies_in_memory_is_small(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from offload.planning.machine import speed_tests

    monkeypatch.setattr(speed_tests, "file_system_of", lambda path: "tmpfs")
    monkeypatch.setattr(speed_tests, "_MEMORY_NBYTES", 32 << 20)
    calls = Calls()
    disk_of(calls, monkeypatch, tmp_path, 96)
    assert max(offset + nbytes for _, offset, nbytes in calls.done) == 32 << 20


def test_a_disk_is_measured_behind_the_page_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from offload.planning.machine import speed_tests

    monkeypatch.setattr(speed_tests, "SwapFile", partial(SwapFile, direct=False))
    synced: list[int] = []
    sync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(fd), sync(fd)))
    found = speed_tests.measure_disk([tmp_path], beside_compute=False, file_nbytes=16 << 20)
    assert found.nvme_write_bytes_per_s > 0
    assert synced


def test_measuring_leaves_the_global_random_numbers_alone() -> None:
    import torch

    from offload.planning.machine.sample_models import measure_models
    from offload.planning.machine.speed_tests import matmul_rate

    cpu = torch.device("cpu")
    before = torch.get_rng_state()
    rate = matmul_rate(torch.float32, cpu, (32, 32, 32))
    sample = (1, 64, 128, 2, 1, 16)
    call_s, touching = measure_models({"fp32": rate, "fp16": rate / 1e6}, cpu, [sample])
    assert torch.equal(torch.get_rng_state(), before)
    assert rate > 0
    assert call_s > 0
    assert touching["fp16"] == touching["fp32"] > 0  # too slow to be tried: fp32 stands for it


def test_a_format_without_a_fast_kernel_is_not_tried_at_length() -> None:
    from offload.planning.machine.speed_tests import is_slow

    assert is_slow(1e9, (512, 1024, 4096))
    assert not is_slow(1e11, (512, 1024, 4096))
