"""Machine reading on made-up machines: cgroup v1 and v2, quotas, mounts, memory that is left."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

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


@pytest.fixture
def cgroup_v2(tmp_path: Path) -> Path:
    return put(
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


@pytest.fixture
def cgroup_v1(tmp_path: Path) -> Path:
    return put(
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


def test_the_limit_of_an_outer_v2_cgroup_binds(cgroup_v2: Path) -> None:
    assert machine.memory_limit_nbytes(cgroup_v2) == 2 * GIB
    assert machine.cpu_quota(cgroup_v2) == 1.5
    assert machine.cpu_count(cgroup_v2) in (1, 2)


def test_a_v1_limit_inside_a_container_binds(cgroup_v1: Path) -> None:
    limits = machine.memory_limits(cgroup_v1)
    assert [(limit.limit_nbytes, limit.used_nbytes) for limit in limits] == [(GIB, GIB // 4)]
    assert machine.cpu_quota(cgroup_v1) == 0.5
    assert machine.cpu_count(cgroup_v1) == 1


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
