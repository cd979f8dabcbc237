"""What is left of the machine's memory, on made-up machines."""

from __future__ import annotations

from pathlib import Path

from offload.memory.memory_guard import read_headroom
from offload.process import machine
from tests.offload.test_machine import GIB, V2_MOUNT, put

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
