"""What is left of the machine's memory, on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.memory.memory_guard import Headroom, MemoryReader
from offload.process import machine
from tests.offload.test_machine import GIB, V1_MOUNT, V2_MOUNT, put

MEMINFO = (
    f"MemTotal: {8 * GIB // 1024} kB\nMemAvailable: {3 * GIB // 1024} kB\n"
    f"SwapFree: {GIB // 1024} kB\n"
)


def limits(root: Path) -> list[Headroom]:
    return MemoryReader(root)()


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


def test_ram_and_swap_are_told_apart(tmp_path: Path) -> None:
    root = put(tmp_path, {"proc/meminfo": MEMINFO})
    (ram,) = limits(root)
    assert (ram.where, ram.limit_nbytes) == ("RAM", 8 * GIB)
    assert (ram.room_nbytes, ram.last_nbytes) == (3 * GIB, 4 * GIB)


def test_memory_high_is_a_limit_that_kills_nothing(tmp_path: Path) -> None:
    root = v2(tmp_path, high=f"{GIB}\n")
    _, high, most = limits(root)
    assert (high.limit_nbytes, high.missing_nbytes) == (GIB, 0)
    assert high.room_nbytes == GIB // 4 + GIB // 8
    assert most.limit_nbytes == 2 * GIB
    assert machine.memory_limit_nbytes(root) == GIB  # plans keep below it, too
    assert machine.available_memory_nbytes(root) == GIB // 4
    full = limits(v2(tmp_path / "full", high=f"{GIB // 2}\n"))[1]
    assert full.room_nbytes == 0
    assert full.missing_nbytes == 0


def test_swap_that_a_cgroup_may_not_use_is_none(tmp_path: Path) -> None:
    root = v2(tmp_path, **{"swap.max": f"{GIB // 2}\n", "swap.current": f"{GIB // 4}\n"})
    _, limit = limits(root)
    assert limit.last_nbytes == limit.room_nbytes + GIB // 4


@pytest.mark.parametrize(("both", "swap"), [(GIB, 0), (GIB + GIB // 2, GIB // 2)])
def test_of_v1_memory_and_swap_have_a_limit_together(tmp_path: Path, both: int, swap: int) -> None:
    root = put(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:memory:/docker/abc\n0::/\n",
            "proc/self/mountinfo": V1_MOUNT,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 2}\n",
            "sys/fs/cgroup/memory/memory.memsw.limit_in_bytes": f"{both}\n",
            "sys/fs/cgroup/memory/memory.memsw.usage_in_bytes": f"{GIB // 2}\n",
            "sys/fs/cgroup/memory/memory.stat": f"cache 9\ntotal_inactive_file {GIB // 4}\n",
        },
    )
    _, limit = limits(root)
    assert limit.room_nbytes == GIB // 2 + GIB // 4
    assert limit.last_nbytes == limit.room_nbytes + swap


def test_a_process_that_is_moved_to_another_cgroup_is_followed(tmp_path: Path) -> None:
    read = MemoryReader(v2(tmp_path))
    assert len(read()) == 2
    put(tmp_path, {"proc/self/cgroup": "0::/other\n", "sys/fs/cgroup/other/memory.max": "max\n"})
    assert len(read()) == 1
