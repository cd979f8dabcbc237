"""fio, where it is installed: an independent raw loop, as a check on ours."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from offload.bench.io import OURS
from offload.bench.record import Kind, Record, Row
from offload.bench.rounds import Say, Timed
from offload.tiers.errors import StorageError
from offload.tiers.units import format_bytes

NAME = "fio"
_BLOCK_NBYTES = 8 << 20
_DEPTH = 4
_TIMEOUT_S = 300.0


def systems(
    folder: Path, nbytes: int, stack: ExitStack, say: Say
) -> tuple[list[Timed], list[Row]]:  # fmt: skip
    """Passes over one file in both directions; the file is closed with `stack`."""
    names = [f"{NAME} {direction}" for direction in ("read", "write")]
    if shutil.which("fio") is None:
        return [], [Row(name, Kind.PEER, note="not installed") for name in names]
    say("fio lays out its file")
    private = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
    fio = Fio(private, nbytes)
    runs = [partial(fio.run, write=write) for write in (False, True)]
    amounts = {"bytes_per_s": float(nbytes)}
    pairs = zip(names, runs, strict=True)
    return [Timed(name, Kind.PEER, run, amounts, fio.note) for name, run in pairs], []


def compare(record: Record) -> None:
    for direction in ("read", "write"):
        record.compare(f"{OURS} {direction}", f"{NAME} {direction}", "bytes_per_s")


class Fio:
    """Passes of `nbytes` over a file of its own in `folder`."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._file = folder / "fio"
        self._nbytes = nbytes
        self._block = min(_BLOCK_NBYTES, nbytes)
        self.note = f"libaio, {_DEPTH} x {format_bytes(self._block)}"
        self.run(write=True)  # lays the file out: first writes to fresh blocks are slower

    def run(self, *, write: bool) -> dict[str, float]:
        """Make one pass, timed by fio itself. StorageError with fio's output if it fails."""
        direction = "write" if write else "read"
        command = [
            "fio", "--name=bench", f"--filename={self._file}", f"--rw={direction}",
            f"--bs={self._block}",
            f"--size={self._nbytes}", "--direct=1", "--ioengine=libaio", f"--iodepth={_DEPTH}",
            "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
        if done.returncode != 0:
            raise StorageError(f"fio ended with status {done.returncode}: {done.stderr.strip()}")
        # it may print a note before the object
        answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        job = answer["jobs"][0]
        seconds = self._nbytes / float(job[direction]["bw_bytes"])
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
        return {"seconds": seconds, "cpu_s_per_gb": cpu_s / self._nbytes * 1e9}
