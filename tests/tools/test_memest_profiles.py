"""Hardware by name, by size, or as it is here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offload.planning.machine.speeds import Speeds
from offload.process import machine
from offload.tiers.errors import ConfigError
from offload.tools.memest.hardware import profiles
from offload.tools.memest.hardware.parts import GEN4, GPUS, MACHINES, SSDS
from offload.tools.memest.hardware.profiles import MATMUL_SHARE, SYSTEM_NBYTES
from offload.tools.memest.hardware.read_profile import (
    LocalGpu,
    local_gpus,
    read_profile,
    this_machine,
)

GIB = 1 << 30


def test_every_figure_names_its_source() -> None:
    for part in (*GPUS, *SSDS, *MACHINES):
        assert len(part.source) > 10, part.name


@pytest.mark.parametrize("name", ["RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090"])
def test_a_part_is_found_however_it_is_written(name: str) -> None:
    profile = read_profile(gpu=name, ram="64GiB", ssd="Gen4 SSD")
    assert profile.gpu is not None
    assert profile.gpu.name == "RTX 4090"


def test_one_rank_gets_an_even_share_of_its_node() -> None:
    profile = read_profile(gpu="RTX 4090", ram="64GiB", nvme="1TiB", gpus=4, nodes=2)
    assert profile.ranks == 8
    hardware = profile.hardware()
    assert hardware.device_nbytes == 24564 << 20
    assert hardware.host_nbytes == (64 * GIB - SYSTEM_NBYTES) // 4
    assert hardware.nvme_free_nbytes == 256 * GIB
    assert "2 nodes" in profile.name


def test_ram_that_is_described_leaves_the_system_its_part() -> None:
    for profile in (read_profile(gpu="none", ram="8GiB"), read_profile(gpu="DGX-2")):
        kept = profile.ram_nbytes - SYSTEM_NBYTES
        hardware = profile.hardware()
        assert profile.usable_ram_nbytes == kept
        assert hardware.host_nbytes == hardware.host_free_nbytes == kept // profile.ranks_per_node
        assert "2.0 GiB are left to the system" in profile.all_notes[-1]
    here = read_profile(gpu="RTX 4090")
    assert here.usable_ram_nbytes == machine.memory_limit_nbytes()
    assert here.all_notes == here.notes


def test_speeds_are_shared_out_and_stay_below_the_peaks() -> None:
    one = read_profile(gpu="A100-80", ram="512GiB", ssd="4 x Gen4 server SSD").speeds()
    four = read_profile(gpu="A100-80", ram="512GiB", ssd="4 x Gen4 server SSD", gpus=4).speeds()
    assert one is not None
    assert four is not None
    assert one.matmul_flops_per_s["bf16"] == pytest.approx(312e12 * MATMUL_SHARE)
    assert four.matmul_flops_per_s == one.matmul_flops_per_s
    assert four.host_bytes_per_s == pytest.approx(one.host_bytes_per_s / 4)
    assert four.nvme_read_bytes_per_s == pytest.approx(one.nvme_read_bytes_per_s / 4)
    assert four.endurance_nbytes == one.endurance_nbytes // 4 == 7008 * 10**12
    assert four.host_to_device_bytes_per_s == one.host_to_device_bytes_per_s < 31.5e9


def test_gpus_behind_few_uplinks_share_them() -> None:
    speeds = read_profile(gpu="DGX-2").speeds()
    assert speeds is not None
    # 4 uplinks for 16 GPUs; ZeRO-Infinity (2104.07857, figure 2) has 3.0 GB/s for each
    assert speeds.host_to_device_bytes_per_s == pytest.approx(3.0e9, rel=0.1)
    assert speeds.nvme_read_bytes_per_s == pytest.approx(1.6e9, rel=0.1)


def test_a_bare_size_says_that_its_speed_is_assumed() -> None:
    profile = read_profile(gpu="24GiB", ram="64GiB", nvme="1TiB")
    assert profile.gpu_nbytes == 24 * GIB
    text = " ".join(profile.notes)
    assert "assumed to be that of an RTX 3090" in text
    assert f"assumed to be that of a {GEN4.name}" in text
    named = read_profile(gpu="RTX 3090", ram="64GiB", ssd="Gen4 SSD")
    assert not any("assumed" in note for note in named.notes)


def test_what_is_not_given_is_as_on_this_machine() -> None:
    profile = read_profile(gpu="H100")
    assert profile.ram_nbytes == machine.memory_limit_nbytes()
    assert any("this machine's" in note for note in profile.notes)


def test_this_machine_is_what_the_process_may_use(tmp_path: Path) -> None:
    profile = this_machine([tmp_path, tmp_path / "not" / "there"])
    assert profile.here
    assert profile.ram_nbytes == machine.memory_limit_nbytes()
    assert 0 < profile.nvme_nbytes < 1 << 60
    once = this_machine([tmp_path]).nvme_nbytes
    assert profile.nvme_nbytes == pytest.approx(once, rel=0.01)  # one file system counts once


def test_measured_speeds_hold_where_it_computes_here_and_named_drives_replace_the_disk() -> None:
    measured = Speeds(
        name="here", gpu=False, matmul_flops_per_s={"fp32": 1e11}, compute_bytes_per_s=1e10,
        operation_s=1e-6, host_bytes_per_s=5e10, nvme_read_bytes_per_s=1e9,
    )  # fmt: skip
    here = replace(this_machine(), gpu=None, gpu_nbytes=0)
    assert here.speeds() is None
    assert here.speeds(measured) == measured
    other = replace(here, ssds=(GEN4, GEN4)).speeds(measured)
    assert other is not None
    assert other.matmul_flops_per_s == measured.matmul_flops_per_s
    assert other.nvme_read_bytes_per_s == pytest.approx(2 * 7.45e9 * profiles.SSD_SHARE)
    assert other.endurance_nbytes == 2400 * 10**12


def test_no_gpu_means_that_the_cpu_computes() -> None:
    profile = read_profile(gpu="none", ram="64GiB", nvme="0")
    hardware = profile.hardware()
    assert hardware.device_nbytes == 0
    assert hardware.kernels_missing is not None
    assert hardware.nvme_free_nbytes == 0
    assert "CPU only" in profile.name


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpu": "RTX 4080"}, "did you mean `RTX 4090`"),
        ({"gpu": "A100"}, "allowed: V100-32, A100-40, A100-80"),
        ({"gpu": "24"}, "24 B is not between"),
        ({"gpu": "24 parsecs"}, "not a unit"),
        ({"ram": "-3GiB"}, "--ram"),
        ({"ram": "9999PiB"}, "--ram"),
        ({"nvme": "floppy"}, "--nvme"),
        ({"nvme": "Gen4 SSD"}, "name it with --ssd"),
        ({"ssd": "floppy"}, "no such part"),
        ({"ssd": "1TiB"}, "write a size like 24GiB with --nvme"),
        ({"ssd": "0 x Gen4 SSD"}, "no such part"),
        ({"gpu": "none", "gpus": 2}, "--gpus"),
    ],
)  # fmt: skip
def test_what_is_no_hardware_is_refused_with_the_option_named(
    options: dict[str, str | int], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_profile(**options)  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gpus_are_read_as_the_driver_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'NVIDIA H200, 143771, 143160'\necho 'NVIDIA GB10, [N/A], [N/A]'\n"
        "echo 'A, B, 24564, 1000'\nexit ${FAILS:-0}\n"
    )
    program.chmod(0o700)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = [LocalGpu("NVIDIA H200", 143771 << 20, 143160 << 20),
             LocalGpu("A, B", 24564 << 20, 1000 << 20)]  # fmt: skip
    assert local_gpus(str(program)) == found
    for setting, shown in [
        ("1,0", found[::-1]), ("1", found[1:]), ("", []), ("-1", []), ("GPU-8932f937", found[:1]),
    ]:  # fmt: skip
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
        assert local_gpus(str(program)) == shown
    monkeypatch.setenv("FAILS", "9")
    assert local_gpus(str(program)) == []
