"""The figures of one step, and the file with a line of JSON per step."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.checkpoint.format.disk import replace_text
from offload.loggers import JSONLinesLogger
from offload.tiers.errors import PathError, StorageError

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class StepMetrics:
    """The figures of one optimizer step. `tiers` is bytes held after it, `moved` bytes by link
    since the start, `waited` seconds of the model's thread by cause. In a row, nan is unknown."""

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
    waited: dict[str, float] = field(default_factory=dict)
    elapsed_seconds: float = 0.0  # from the beginning of the run to the end of the step
    figures: dict[str, float] = field(default_factory=dict)  # of the user's own, by name

    def values(self) -> dict[str, Any]:
        """The figures that a logger receives beside the step."""
        return {name: getattr(self, name) for name in _NAMES}

    @classmethod
    def from_json(cls, line: str) -> StepMetrics:
        """Parse a line of a `MetricsFile`; unknown figures of other versions are ignored."""
        values = {k: v for k, v in json.loads(line).items() if k == "step" or k in _NAMES}
        for name in ("loss", "lr", "tokens_per_second"):
            if values.get(name) is None:
                values[name] = math.nan
        values.setdefault("gradient_norm", None)
        return cls(**values)


_NAMES = tuple(each.name for each in fields(StepMetrics) if each.name != "step")


def grown(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """The seconds by which each count has grown."""
    return {name: seconds - before.get(name, 0.0) for name, seconds in now.items()}


class MetricsFile(JSONLinesLogger):
    """The metrics file of a run's folder."""

    def begin(self, steps_done: int) -> None:
        """Keep only the first `steps_done` steps of an earlier run."""
        lines = [line for line in self._whole_lines() if json.loads(line)["step"] <= steps_done]
        write_whole(self.path, "".join(f"{line}\n" for line in lines))

    def read(self) -> list[StepMetrics]:
        """Return every step so far; a line cut short by a crash is left out."""
        return [StepMetrics.from_json(line) for line in self._whole_lines()]

    def _whole_lines(self) -> list[str]:
        self.flush()
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [line for line in lines if _is_whole(line)]


def _is_whole(line: str) -> bool:
    """Whether a line is complete; one that was cut short may still end in a brace."""
    try:
        return "step" in json.loads(line)
    except (ValueError, TypeError):
        return False


def write_whole(path: Path, text: str) -> None:
    """Replace the file by `text`, durably: readers find the old or the new. Raise PathError."""
    try:
        replace_text(path, text)
    except StorageError as error:
        raise PathError(f"cannot write {path}: {os.strerror(error.errno or errno.EIO)}") from None
