"""fio, where it is installed: somebody else's raw loop, as a check on ours."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.tiers.errors import StorageError
from offload.tiers.units import format_bytes

NAME = "fio"
_BLOCK_NBYTES = 8 << 20
_DEPTH = 4
_TIMEOUT_S = 300.0


def has_fio() -> bool:
    return shutil.which("fio") is not None


@dataclass(frozen=True)
class FioRun:
    """What fio says of one pass."""

    seconds: float
    cpu_s: float


class Fio:
    """Passes of `nbytes` over a file of its own in `folder`, which is removed by `close`."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._file = folder / "fio"
        self._nbytes = nbytes
        self._block = min(_BLOCK_NBYTES, nbytes)
        self.note = f"libaio, {_DEPTH} x {format_bytes(self._block)}"
        self.run(write=True)  # lays the file out: first writes to fresh blocks are slower

    def run(self, *, write: bool) -> FioRun:
        """One pass, of fio's own timing. StorageError with what fio wrote if it fails."""
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
        return FioRun(seconds, (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds)

    def close(self) -> None:
        self._file.unlink(missing_ok=True)
