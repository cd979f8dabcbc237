"""Hardware by name, by size, or as it is here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from offload.planning.machine.speeds import Speeds
from offload.process import machine
from offload.tiers.errors import ConfigError
from offload.tools.memest.hardware import profiles
from offload.tools.memest.hardware.parts import GEN4, GPUS, LINKS, MACHINES, SSDS
from offload.tools.memest.hardware.profiles import MATMUL_SHARE, SYSTEM_NBYTES, with_ram
from offload.tools.memest.hardware.read_profile import (
    LocalGpu,
    local_gpus,
    read_profile,
    this_machine,
    visible,
)

GIB = 1 << 30
ROOT = Path(__file__).parents[2]


def test_every_figure_names_its_source() -> None:
    for part in (*GPUS, *LINKS, *SSDS, *MACHINES):
        assert len(part.source) > 10, part.name


def test_names_are_unique_whatever_their_spelling() -> None:
    for parts in (GPUS, SSDS, MACHINES):
        names = [part.name.lower().replace(" ", "").replace("-", "") for part in parts]
        assert len(set(names)) == len(names)


def test_all_parts_that_were_asked_for_are_there() -> None:
    wanted = {
        "V100-32", "A100-40", "A100-80", "H100", "H200", "GH200", "RTX 3090", "RTX 4090", "RTX 5090"
    }  # fmt: skip
    assert wanted == {gpu.name for gpu in GPUS}
    assert {"Gen3 SSD", "Gen4 SSD", "Gen5 SSD"} <= {ssd.name for ssd in SSDS}
    assert all(gpu.flops_per_s["bf16"] <= gpu.flops_per_s["fp16"] for gpu in GPUS)
    assert all(ssd.endurance_nbytes > 100 * ssd.nbytes for ssd in SSDS)


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
        assert "2.0 GiB are left to the system" in profile.reserve_note
    here = read_profile(gpu="RTX 4090")
    assert here.usable_ram_nbytes == machine.memory_limit_nbytes()
    assert here.reserve_note == ""


def test_what_the_system_keeps_can_be_said() -> None:
    container = read_profile(gpu="none", ram="4GiB", reserve="0")
    assert container.usable_ram_nbytes == 4 * GIB
    assert container.reserve_note == ""
    shared = read_profile(gpu="DGX-2", reserve="64GiB")
    assert shared.ram_nbytes - shared.usable_ram_nbytes == 64 * GIB
    assert with_ram(shared, 128 * GIB).usable_ram_nbytes == 64 * GIB
    for ram, reserve, said in [
        (None, "1GiB", "goes with --ram"), ("4GiB", "4GiB", "leaves less than"),
        ("4GiB", "-1", "not a size"), ("4GiB", "much", "not a size"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            read_profile(gpu="none", ram=ram, reserve=reserve)


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
        ({"gpu": "RTX 4080"}, "did you mean 'RTX 4090'"),
        ({"gpu": "H100 80GB"}, "did you mean 'H100'"),
        ({"gpu": "A100"}, "A100-40 or A100-80"),
        ({"gpu": "24"}, "24 B is not between"),
        ({"gpu": "24 parsecs"}, "not a unit"),
        ({"ram": "-3GiB"}, "--ram"),
        ({"ram": "9999PiB"}, "--ram"),
        ({"ram": "1e30"}, "--ram"),
        ({"nvme": "floppy"}, "--nvme"),
        ({"nvme": "Gen4 SSD"}, "name it with --ssd"),
        ({"ssd": "floppy"}, "no such part"),
        ({"ssd": "1TiB"}, "write a size like 24GiB with --nvme"),
        ({"ssd": "0 x Gen4 SSD"}, "0 drives"),
        ({"gpu": "H100", "gpus": 0}, "--gpus 0"),
        ({"gpu": "none", "gpus": 2}, "--gpus"),
        ({"nodes": 0}, "--nodes 0"),
        ({"nodes": 1 << 40}, "--nodes"),
    ],
)  # fmt: skip
def test_what_is_no_hardware_is_refused_with_the_option_named(
    options: dict[str, str | int], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_profile(**options)  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gpus_are_those_that_cuda_would_show() -> None:
    gpus = [LocalGpu(f"gpu {i}", 1, 1) for i in range(4)]
    assert visible(gpus, None) == gpus
    assert visible(gpus, "2,0") == [gpus[2], gpus[0]]
    assert visible(gpus, "") == visible(gpus, "-1") == []
    assert len(visible(gpus, "GPU-8932f937,GPU-8932f938")) == 2


def test_without_a_driver_there_is_no_gpu() -> None:
    assert local_gpus("no-such-program") == []


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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert local_gpus(str(program)) == found[1:]
    monkeypatch.setenv("FAILS", "9")
    assert local_gpus(str(program)) == []


def test_nothing_here_imports_torch() -> None:
    program = (
        "import sys\n"
        "from offload.tools.memest.estimate import other_systems\n"
        "from offload.tools.memest.hardware.read_profile import read_profile\n"
        "read_profile(gpu='H100').speeds()\n"
        "heavy = {'torch', 'numba', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_a_disk_beside_a_gpu_that_is_elsewhere_is_assumed_as_fast_as_a_usual_one() -> None:
    profile = read_profile(gpu="RTX 4090", ram="64GiB")
    speeds, named = profile.speeds(), read_profile(gpu="RTX 4090", ram="64GiB", ssd="Gen4 SSD")
    assert profile.nvme_nbytes > 0
    assert speeds is not None
    assert speeds.nvme_read_bytes_per_s == named.speeds().nvme_read_bytes_per_s  # type: ignore[union-attr]
    assert any("assumed to be that of a Gen4 SSD" in note for note in profile.notes)
    assert read_profile(gpu="none", ram="64GiB").ssds == ()
