"""Hardware by name, by size, or as it is here."""

from dataclasses import replace
from pathlib import Path

import pytest

from offload.planning.machine.speeds import Speeds
from offload.process import machine
from offload.tiers.errors import ConfigError
from offload.tools.memest.hardware import profiles
from offload.tools.memest.hardware.parts import GEN4, GPUS, SSDS
from offload.tools.memest.hardware.profiles import SYSTEM_NBYTES
from offload.tools.memest.hardware.read_profile import (
    LocalGpu,
    local_gpus,
    read_profile,
    this_machine,
)

GIB = 1 << 30


def test_every_figure_names_its_source() -> None:
    for part in (*GPUS, *SSDS):
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
    assert "2 nodes" in profile.text


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
    gpus = [LocalGpu("NVIDIA H200", 143771 << 20, 143160 << 20),
             LocalGpu("A, B", 24564 << 20, 1000 << 20)]  # fmt: skip
    assert local_gpus(str(program)) == gpus
    for setting, shown in [
        ("1,0", gpus[::-1]), ("1", gpus[1:]), ("", []), ("-1", []), ("GPU-8932f937", gpus[:1]),
    ]:  # fmt: skip
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
        assert local_gpus(str(program)) == shown
    monkeypatch.setenv("FAILS", "9")
    assert local_gpus(str(program)) == []
