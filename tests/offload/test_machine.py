"""Machine reading on made-up machines: cgroup v1 and v2, quotas, mounts, memory that is left; the
doctor's checks and how they are printed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import typer

from offload.cli.doctor import Check, Status, check_path, print_checks, run_checks, verdict
from offload.memory.memory_guard import read_headroom
from offload.process import machine

GIB = 1 << 30


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
V1_MOUNT = (
    "31 23 0:27 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 23 0:28 /docker/abc /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
)


def test_the_limit_of_an_outer_v2_cgroup_binds(tmp_path: Path) -> None:
    root = put(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/run.scope\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/cgroup.controllers": "cpu memory",
            "sys/fs/cgroup/user.slice/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/user.slice/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/user.slice/memory.stat": f"anon 5\ninactive_file {GIB // 4}\n",
            "sys/fs/cgroup/user.slice/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/user.slice/run.scope/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/run.scope/cpu.max": "max 100000\n",
        },
    )
    assert machine.memory_limit_nbytes(root) == 2 * GIB
    assert machine.cpu_quota(root) == 1.5
    assert machine.cpu_count(root) in (1, 2)


def test_a_v1_limit_inside_a_container_binds(tmp_path: Path) -> None:
    root = put(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/abc/inner\n4:cpu,cpuacct:/docker/abc\n0::/\n",
            "proc/self/mountinfo": V1_MOUNT,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 2}\n",
            "sys/fs/cgroup/memory/memory.stat": f"cache 9\ntotal_inactive_file {GIB // 4}\n",
            "sys/fs/cgroup/memory/inner/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    limits = machine.memory_limits(root)
    assert [(limit.limit_nbytes, limit.used_nbytes) for limit in limits] == [(GIB, GIB // 4)]
    assert machine.cpu_quota(root) == 0.5
    assert machine.cpu_count(root) == 1


def test_this_machine_can_be_read() -> None:
    assert 0 < machine.available_memory_nbytes() <= machine.memory_limit_nbytes()
    assert machine.cpu_count() >= 1
    assert 0 < machine.rss_nbytes() <= machine.peak_rss_nbytes() * 1.01
    assert machine.mount_of(Path("/")) is not None


@pytest.mark.parametrize(
    ("temporary", "var", "asked", "chosen"),
    [
        ("ext4", "ext4", False, "temporary"), ("tmpfs", "ext4", False, "var"),
        ("tmpfs", "ext4", True, "temporary"), ("tmpfs", "tmpfs", False, "temporary"),
    ],
)  # fmt: skip
def test_swap_files_lie_on_a_disk_where_the_temporary_folder_is_ram(
    temporary: str, var: str, asked: bool, chosen: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folders = {"temporary": Path(tempfile.gettempdir()), "var": Path("/var/tmp")}
    kinds = {"temporary": temporary, "var": var}
    lines = [
        f"{n} 1 0:{n} / {folder.resolve()} rw - {kinds[name]} none rw"
        for n, (name, folder) in enumerate(folders.items(), 1)
    ]
    put(tmp_path, {"proc/self/mountinfo": "\n".join(lines)})
    monkeypatch.delenv("TMPDIR", raising=False)
    if asked:
        monkeypatch.setenv("TMPDIR", str(folders["temporary"]))
    assert machine.swap_folder(tmp_path) == folders[chosen]


MEMINFO = f"MemTotal: {8 * GIB // 1024} kB\nMemAvailable: {3 * GIB // 1024} kB\n"


def v2(tmp_path: Path, **files: str) -> Path:
    here = "sys/fs/cgroup/run/memory"
    made = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/run\n",
        "proc/self/mountinfo": V2_MOUNT,
        f"{here}.max": f"{2 * GIB}\n",
        f"{here}.high": "max\n",
        f"{here}.current": f"{GIB}\n",
        f"{here}.swap.max": "max\n",
        f"{here}.swap.current": "0\n",
        f"{here}.stat": (
            f"anon 5\ninactive_file {GIB // 4}\nactive_file {GIB // 4}\nfile_mapped {GIB // 8}\n"
        ),
    }
    return put(tmp_path, made | {f"{here}.{name}": text for name, text in files.items()})


def test_room_is_the_ram_without_swap(tmp_path: Path) -> None:
    root = put(tmp_path, {"proc/meminfo": MEMINFO})
    (ram,) = read_headroom(root)
    assert (ram.where, ram.limit_nbytes) == ("RAM", 8 * GIB)
    assert ram.room_nbytes == 3 * GIB


def test_memory_high_is_a_limit(tmp_path: Path) -> None:
    root = v2(tmp_path, high=f"{GIB}\n")
    _, high, maximum = read_headroom(root)
    assert high.limit_nbytes == GIB
    assert high.room_nbytes == GIB // 4 + GIB // 8
    assert maximum.limit_nbytes == 2 * GIB
    assert machine.memory_limit_nbytes(root) == GIB  # plans keep below it, too
    assert machine.available_memory_nbytes(root) == GIB // 4
    full = read_headroom(v2(tmp_path / "full", high=f"{GIB // 2}\n"))[1]
    assert full.room_nbytes == 0


def test_swap_of_a_cgroup_is_not_counted_on(tmp_path: Path) -> None:
    _, limit = read_headroom(v2(tmp_path, **{"swap.max": f"{GIB // 2}\n"}))
    assert limit.room_nbytes == GIB + GIB // 8 + GIB // 4


def test_a_missing_folder_is_named_with_its_remedy(tmp_path: Path) -> None:
    (check,) = check_path(tmp_path / "nothing")
    assert (check.status, check.finding) == ("fail", "does not exist")
    assert check.advice.startswith(f"mkdir -p {tmp_path / 'nothing'}")
    (tmp_path / "file").touch()
    assert check_path(tmp_path / "file")[0].finding == "is not a folder"


def test_a_folder_open_to_all_is_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert any(check.finding == "world-writable, no sticky bit" for check in check_path(tmp_path))
    tmp_path.chmod(0o1777)
    assert not any("world-writable" in check.finding for check in check_path(tmp_path))


def test_a_folder_in_ram_is_a_warning() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    checks = {check.name: check for check in check_path(Path("/dev/shm"))}
    assert checks["/dev/shm file system"].status == "warn"


def checked(*checks: tuple[str, Status, str]) -> list[Check]:
    """The check of an installed torch, and the given ones."""
    return [Check("torch", "ok", "2.13"), *(Check(*check, advice="do it") for check in checks)]


def test_the_verdict_says_what_the_machine_can_do() -> None:
    cpu = verdict(checked(("gpu", "off", "built for the CPU only; device: cpu is used")))
    assert cpu == (
        True,
        ["ready: trains on the CPU with host and nvme", "no GPU: built for the CPU only"],
    )
    _, one = verdict(
        checked(("gpu 0", "ok", "H100, 80.0 GiB, CUDA 13.0"), ("swap", "warn", "full"))
    )
    assert one == [
        "ready: trains on H100 with device, host and nvme",
        "to look at, with the advice above: swap",
    ]
    _, two = verdict(checked(("gpu 0", "ok", "H100, 80 GiB"), ("gpu 1", "ok", "H100, 80 GiB")))
    assert "2 GPUs (H100; torchrun --nproc-per-node 2)" in two[0]


def test_the_exit_code_agrees_with_the_verdict(tmp_path: Path, capsys: Any) -> None:
    print_checks([tmp_path])
    assert "ready: trains on " in capsys.readouterr().out
    with pytest.raises(typer.Exit) as ended:
        print_checks([tmp_path / "nothing"])
    assert ended.value.exit_code == 2, "as of any path that is not there"
    assert "not ready: " in capsys.readouterr().out


def test_a_device_that_cannot_be_asked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        kind = "cuda"

        def device_count(self) -> int:
            return 1

        def facts(self, device: object) -> object:
            raise RuntimeError("CUDA unknown error\nsecond line")

    monkeypatch.setattr("offload.tiers.accelerator.default", Broken)
    (gpu,) = [check for check in run_checks() if check.name.startswith("gpu")]
    assert (gpu.status, gpu.finding) == ("fail", "cannot be used: CUDA unknown error")
