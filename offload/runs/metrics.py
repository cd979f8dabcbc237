"""The figures of one step, and the file with a line of JSON per step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offload.swap.line_file import LineFile
from offload.tiers.errors import PathError


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. Tiers: bytes held after it. Moved: bytes since the start."""

    step: int  # 1-based: steps done
    loss: float
    lr: float
    seconds: float
    tokens_per_second: float
    gradient_norm: float | None
    skipped_steps: int
    rss_nbytes: int
    tiers: dict[str, int]
    moved: dict[str, int]
    validation_loss: float | None = None

    def values(self) -> dict[str, Any]:
        """The figures that a logger gets beside the step."""
        values = asdict(self)
        del values["step"]
        return values

    @classmethod
    def from_json(cls, line: str) -> StepMetrics:
        """A line of a `MetricsFile`."""
        values = json.loads(line)
        if values["loss"] is None:
            values["loss"] = math.nan
        return cls(**values)


class MetricsFile:
    """A logger that writes a line of JSON per step, beside the steps that follow."""

    def __init__(self, path: Path) -> None:
        """Nothing is written before `log` or `begin`."""
        self.path = path
        self._lines: LineFile | None = None

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Values that are not finite become null, since JSON has no NaN."""
        if self._lines is None:
            self._lines = LineFile(self.path)
        finite = {name: _finite(value) for name, value in values.items()}
        self._lines.append(json.dumps({"step": step, **finite}))

    def begin(self, steps_done: int) -> None:
        """Keep the first `steps_done` steps of an earlier run, and no others."""
        lines = [line for line in self._whole_lines() if json.loads(line)["step"] <= steps_done]
        write_whole(self.path, "".join(f"{line}\n" for line in lines))

    def read(self) -> list[StepMetrics]:
        """Every step so far; a line cut short by a crash is left out."""
        return [StepMetrics.from_json(line) for line in self._whole_lines()]

    def _whole_lines(self) -> list[str]:
        self.flush()
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [line for line in lines if line.endswith("}")]

    def flush(self) -> None:
        """Wait until all steps are in the file."""
        if self._lines is not None:
            self._lines.flush()

    def close(self) -> None:
        """As `flush`, and end the thread that writes."""
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()


def write_whole(path: Path, text: str) -> None:
    """Replace the file by `text`, durably: a reader finds the old text or the new. PathError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise PathError(f"cannot write {path}: {error.strerror}") from None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
