"""The figures of one step, and the file with a line of JSON per step."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter

from offload.checkpoint.format.disk import replace_text
from offload.loggers import JSONLinesLogger
from offload.tiers.errors import PathError, StorageError

if TYPE_CHECKING:
    from offload.report import Report


@dataclass(frozen=True)
class StepMetrics:
    """The figures of one optimizer step. `tiers` is bytes held after it, `moved` bytes by link
    since the start, `waited` seconds of the model's thread by cause. In a row, nan is unknown."""

    step: Annotated[int, Field(strict=True, ge=0)]  # 1-based: steps done
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

    @classmethod
    def of(cls, report: Report, **own: Any) -> StepMetrics:
        """Return the figures of a step: `own`, and those that an engine's report has by the same
        name."""
        names = {each.name for each in fields(report)} & {*_NAMES} - own.keys()
        return cls(**{name: getattr(report, name) for name in names}, **own)

    def values(self) -> dict[str, Any]:
        """The figures that a logger receives beside the step."""
        return {name: getattr(self, name) for name in _NAMES}

    @classmethod
    def from_json(cls, line: str) -> StepMetrics:
        """Parse a line of a `MetricsFile`. Unknown figures, and those that another version did not
        have, get their defaults. ValueError if it is no step, or has values of other types."""
        try:
            values = json.loads(line)
        except RecursionError as error:
            raise ValueError("too many brackets to be a step") from error
        if not isinstance(values, dict):
            raise ValueError(f"a {type(values).__name__} is no step")
        known = {name: value for name, value in values.items() if value is not None}
        if isinstance(known.get("figures"), dict):  # those that were not finite are null
            known["figures"] = {
                name: math.nan if value is None else value
                for name, value in known["figures"].items()
            }
        return _adapter().validate_python({**_UNKNOWN, **known})


@cache
def _adapter() -> TypeAdapter[StepMetrics]:
    return TypeAdapter(StepMetrics)


_UNKNOWN: Mapping[str, Any] = {
    "loss": math.nan, "lr": math.nan, "seconds": 0.0, "tokens_per_second": math.nan,
    "gradient_norm": None, "skipped_steps": 0, "rss_nbytes": 0, "tiers": {}, "moved": {},
}  # fmt: skip
_NAMES = tuple(each.name for each in fields(StepMetrics) if each.name != "step")


def grown(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """The seconds by which each count has grown."""
    return {name: seconds - before.get(name, 0.0) for name, seconds in now.items()}


class MetricsFile(JSONLinesLogger):
    """The metrics file of a run's folder."""

    def begin(self, steps_done: int) -> None:
        """Keep only the first `steps_done` steps of an earlier run."""
        kept = [line for line, row in self._steps() if row.step <= steps_done]
        write_whole(self.path, "".join(f"{line}\n" for line in kept))

    def read(self) -> list[StepMetrics]:
        """Return every step so far; a line cut short by a crash is left out."""
        return [row for _, row in self._steps()]

    def _steps(self) -> Iterator[tuple[str, StepMetrics]]:
        """Yield each whole line with the step that it is."""
        self.flush()
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            with suppress(ValueError):
                yield line, StepMetrics.from_json(line)


def write_whole(path: Path, text: str) -> None:
    """Replace the file by `text`, durably: readers find the old or the new. Raise PathError."""
    try:
        replace_text(path, text)
    except StorageError as error:
        raise PathError(f"cannot write {path}: {os.strerror(error.errno or errno.EIO)}") from None
