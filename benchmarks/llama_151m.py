"""Memory and speed of the 151 M Llama shape: plain PyTorch, all on host, all on nvme.

    python benchmarks/llama_151m.py [--steps 7] [--batch 2] [--sequence 256] [--json FILE]

Each system is a process of its own; they step in turn (plain, host, nvme, plain, ...), so that a
machine whose speed drifts treats all alike: read the ratios, not the seconds. The disk's bandwidth
is measured by fio in the same run, where fio is installed, else by our own raw loop (said).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from offload.machine import cpu_model
from offload.swap.measure import measure_bandwidth

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "llama-151m.yaml"
SYSTEMS = ("plain", "host", "nvme")
WARMUP = 2  # the first step compiles kernels and learns the trace


@dataclass
class Measured:
    """One system. Seconds per step after the warm-up; bytes per step over each link."""

    peak_rss: int = 0
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class System:
    """A process that trains one step when told."""

    def __init__(self, name: str, config: Path, shape: tuple[int, int]) -> None:
        program = str(ROOT / "benchmarks" / "systems.py")
        command = [sys.executable, program, name, str(config), *map(str, shape)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.measured = Measured()
        self._before: dict[str, int] = {}
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "a pipe was asked for"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a system ended early with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def step(self, *, counted: bool) -> None:
        assert self._process.stdin is not None, "a pipe was asked for"
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        answer = self._answer()
        measured = self.measured
        measured.peak_rss = answer["rss"]
        measured.losses.append(answer["loss"])
        if counted:
            measured.seconds.append(answer["seconds"])
            measured.moved = {k: v - self._before[k] for k, v in answer["moved"].items()}
        self._before = answer["moved"]

    def close(self) -> None:
        assert self._process.stdin is not None, "a pipe was asked for"
        self._process.stdin.close()
        self._process.wait(timeout=120)


@dataclass(frozen=True)
class Disk:
    """Bytes per second of large direct reads and writes, and who measured them."""

    read: float
    write: float
    source: str


def measure_disk() -> Disk:
    folder = tempfile.gettempdir()
    if shutil.which("fio") is None:
        bandwidth = measure_bandwidth(folder, 512 << 20)
        return Disk(*bandwidth, "our own raw loop (fio is not installed)")
    return Disk(_fio(folder, "read"), _fio(folder, "write"), "fio, libaio, 8 MiB x 4")


def _fio(folder: str, direction: str) -> float:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        out = subprocess.run(
            ["fio", "--name=bench", f"--filename={file.name}", f"--rw={direction}", "--bs=8M",
             "--size=1G", "--direct=1", "--ioengine=libaio", "--iodepth=4", "--loops=2",
             "--output-format=json"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    return float(json.loads(out)["jobs"][0][direction]["bw_bytes"])


def run(steps: int, config: Path, shape: tuple[int, int]) -> tuple[dict[str, Measured], Disk]:
    systems = {name: System(name, config, shape) for name in SYSTEMS}
    disks = [measure_disk()]
    for number in range(WARMUP + steps):
        for system in systems.values():
            system.step(counted=number >= WARMUP)
    disks.append(measure_disk())
    for system in systems.values():
        system.close()
    best = Disk(max(d.read for d in disks), max(d.write for d in disks), disks[0].source)
    return {name: system.measured for name, system in systems.items()}, best


def io_seconds(moved: dict[str, int], disk: Disk) -> float:
    """Time the disk alone needs for one step's bytes, reads and writes one after the other."""
    return moved.get("nvme read", 0) / disk.read + moved.get("nvme write", 0) / disk.write


def paired_ratio(ours: Measured, plain: Measured) -> float:
    """Median over rounds of the ratio within the round."""
    pairs = zip(ours.seconds, plain.seconds, strict=True)
    return statistics.median(a / b for a, b in pairs)


def table(results: dict[str, Measured], disk: Disk, shape: tuple[int, int]) -> Table:
    plain, nvme = results["plain"], results["nvme"]
    bound = max(plain.median, io_seconds(nvme.moved, disk))
    view = Table(title=f"151 M Llama shape, {shape[0]} x {shape[1]} tokens; {cpu_model()}")
    for column in ("system", "s / step", "x plain", "x bound", "peak RSS", "x plain", "GB / step"):
        view.add_column(column, justify="left" if column == "system" else "right")
    for name, measured in results.items():
        moved = sum(measured.moved.values()) / 1e9
        view.add_row(
            name, f"{measured.median:.2f}", f"{paired_ratio(measured, plain):.2f}",
            f"{measured.median / bound:.2f}" if name == "nvme" else "-",
            f"{measured.peak_rss / 2**30:.2f} GiB", f"{measured.peak_rss / plain.peak_rss:.2f}",
            f"{moved:.2f}" if moved else "-",
        )  # fmt: skip
    view.caption = (
        f"bound: the larger of plain's step and the step's bytes at the disk's bandwidth "
        f"({io_seconds(nvme.moved, disk):.2f} s at {disk.read / 1e9:.2f} GB/s read, "
        f"{disk.write / 1e9:.2f} GB/s write; {disk.source})"
    )
    return view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = (options.batch, options.sequence)
    results, disk = run(options.steps, options.config, shape)
    if results["host"].losses != results["nvme"].losses:
        raise SystemExit("host and nvme do not have the same losses: a bug, please report it")
    Console(width=100).print(table(results, disk, shape))
    if options.json is not None:
        record = {name: asdict(measured) for name, measured in results.items()}
        machine = {
            "cpu": cpu_model(),
            "disk": asdict(disk),
            "config": options.config.name,
            "shape": shape,
        }
        options.json.write_text(json.dumps({"machine": machine, **record}, indent=1) + "\n")


if __name__ == "__main__":
    main()
