"""Speeds are measured once per machine, kept whole or not at all, and read without torch."""

import json
import logging
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.planning.machine import calibration
from offload.planning.machine.calibration import known_speeds, machine_speeds
from offload.planning.machine.speeds import ComputeSpeeds, DiskSpeeds
from offload.process.disk_cache import key_of
from offload.swap.threads.worker import ParallelRunner
from offload.tiers.errors import PathError

COMPUTE: dict[str, Any] = {
    "gpu": False, "matmul_flops_per_s": {"fp32": 1e11, "bf16": 3e11},
    "compute_bytes_per_s": 2e10, "compute_bytes_per_s_in": {"fp32": 2e10, "bf16": 1e10},
    "operation_s": 1e-5, "host_bytes_per_s": 5e10, "optimizer_parameters_per_s": {"fp32": 2e9},
    "host_to_device_bytes_per_s": 0.0, "device_to_host_bytes_per_s": 0.0,
}  # fmt: skip
DISK: dict[str, Any] = {
    "nvme_read_bytes_per_s": 1e9, "nvme_write_bytes_per_s": 2e9,
    "nvme_mixed_bytes_per_s": 1.5e9, "io_lost_s_per_byte": 1e-10,
}  # fmt: skip


class Counted:
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
    counts = Counted()
    monkeypatch.setattr(calibration, "_measure_compute", counts.measure_compute)
    monkeypatch.setattr(calibration, "_measure_disk", counts.measure_disk)
    return counts


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "offload" / "speeds").iterdir())


def test_a_machine_is_measured_once(counted: Counted, tmp_path: Path) -> None:
    assert known_speeds([tmp_path]) is None
    first = machine_speeds([tmp_path])
    assert machine_speeds([tmp_path]) == known_speeds([tmp_path]) == first
    assert (counted.compute, counted.disk) == (1, 1)
    assert first.nvme_read_bytes_per_s == 1e9
    assert first.matmul_flops_per_s["bf16"] == 3e11


def change(file: Path, name: str, otherwise: str, value: object) -> None:
    """Another number in a file that is whole: `otherwise`, where it has no `name`."""
    answer = json.loads(file.read_text())["answer"]
    answer[name if name in answer else otherwise] = value
    file.write_text(json.dumps({"answer": answer, "digest": key_of(answer)}))


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
        speeds = machine_speeds([tmp_path])
    assert speeds.nvme_write_bytes_per_s == 2e9
    assert "cannot be kept" in caplog.text
    assert "XDG_CACHE_HOME" in caplog.text


def test_a_machine_that_others_use_is_measured_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration.psutil, "cpu_percent", lambda interval: 90.0)
    with caplog.at_level(logging.WARNING, logger="offload"):
        calibration._tell_of_measuring("speed of computing")
    assert "other programs take 90 % of this machine's cores" in caplog.text


def test_a_folder_on_a_drive_that_is_not_there_is_refused(counted: Counted, tmp_path: Path) -> None:
    missing = tmp_path / "drive" / "offload"
    assert known_speeds([missing]) is None
    with pytest.raises(PathError, match="is the drive mounted"):
        machine_speeds([missing])
    assert counted.disk == 0


# ---------------------------------------------------------------- the measurements themselves
def test_a_disk_is_measured_in_both_directions(tmp_path: Path) -> None:
    from offload.planning.machine.speed_tests import measure_disk

    before = set(tmp_path.iterdir())
    speeds = measure_disk([tmp_path], beside_compute=False, file_nbytes=32 << 20)
    assert min(speeds.nvme_read_bytes_per_s, speeds.nvme_write_bytes_per_s) > 0
    assert speeds.nvme_mixed_bytes_per_s > 0
    assert speeds.io_lost_s_per_byte == 0  # nothing beside it
    assert set(tmp_path.iterdir()) == before


def test_measuring_leaves_the_global_random_numbers_alone() -> None:
    from offload.planning.machine.speed_tests import matmul_rate, measure_models

    cpu = torch.device("cpu")
    before = torch.get_rng_state()
    rate = matmul_rate(torch.float32, cpu, (32, 32, 32))
    sample = (1, 64, 128, 2, 1, 16)
    call_s, touching = measure_models({"fp32": rate, "fp16": rate / 1e6}, cpu, [sample])
    assert torch.equal(torch.get_rng_state(), before)
    assert rate > 0
    assert call_s > 0
    assert touching["fp16"] == touching["fp32"] > 0  # too slow to be tried: fp32 stands for it


def test_the_cost_of_a_call_is_told_from_that_of_elements() -> None:
    from offload.planning.machine.speed_tests import optimizer_rates

    class Slow(ParallelRunner):
        def __call__(self, body: Callable[[int, int], None], n: int) -> None:
            time.sleep(2e-3)
            super().__call__(body, n)

    numel = 1 << 20
    with closing(Slow(1)) as slow, closing(ParallelRunner(1)) as runner:
        call_s, rates = optimizer_rates(numel, slow)
        quick_s, _ = optimizer_rates(numel, runner)
    assert quick_s < 2e-3 <= call_s
    assert rates.keys() == {"fp32", "bf16", "int8"}
    assert min(rates.values()) > 0
