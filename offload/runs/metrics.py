"""The figures of one step, and the files of a run that hold figures.

metrics.jsonl      a line of JSON per step
prediction.json    written before the first step: the expected figures of the run's plan
measured.json      written after the last: ledger peaks, peak RSS, seconds of a usual step
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter

from offload.checkpoint.format.disk import write_named
from offload.loggers import JSONLinesLogger
from offload.process.disk_cache import Nbytes, Positive

if TYPE_CHECKING:
    from offload.report import Report

PREDICTION, MEASURED = "prediction.json", "measured.json"
SETTLING_STEPS = 2  # the first learns the order of uses, the second is the first to fetch ahead


@dataclass(frozen=True)
class StepMetrics:
    """The figures of one optimizer step. `tiers` is bytes held after it, `moved` bytes by link
    since the start, `waited` seconds of the model's thread by cause. None is unknown."""

    step: int  # 1-based: steps done
    loss: float | None
    lr: float
    seconds: float
    tokens_per_second: float | None
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


_NAMES = tuple(each.name for each in fields(StepMetrics) if each.name != "step")


class MetricsFile(JSONLinesLogger):
    """The metrics file of a run's folder."""

    def begin(self, steps_done: int) -> None:
        """Keep only the first `steps_done` steps of an earlier run."""
        kept = [line for line, row in self._steps() if row["step"] <= steps_done]
        write_named(self.path, "".join(f"{line}\n" for line in kept))

    def read(self) -> list[dict[str, Any]]:
        """Return the figures of every step so far; a line that is no step, such as one that was cut
        short by a crash, is left out."""
        return [row for _, row in self._steps()]

    def _steps(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each line that is a step, with the figures in it."""
        self.flush()
        text = self.path.read_text(errors="replace") if self.path.exists() else ""
        for line in text.splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    yield line, row


@dataclass(frozen=True)
class _Figures:
    """Peaks in bytes and the seconds of a usual step of a run, stored as JSON."""

    tiers: Mapping[str, Nbytes]  # the ledgers' peaks
    rss_nbytes: Annotated[Nbytes, Field(gt=0)]
    seconds: Positive | None

    def to_json(self) -> str:
        return TypeAdapter(type(self)).dump_json(self, indent=1).decode() + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the text that `to_json` wrote. Raise ValueError for any other text."""
        return TypeAdapter(cls).validate_json(text)


@dataclass(frozen=True)
class Prediction(_Figures):
    """The predicted figures (seconds None: the speeds of the machine are not known)."""

    bounds: tuple[str, ...] = ()  # tiers of which the most is predicted that can come
    format: Literal[1] = 1


@dataclass(frozen=True)
class Measured(_Figures):
    """The measured figures (seconds None: too few steps)."""

    steps: Nbytes
    cut_short: bool = False  # by an error, or by a Ctrl-C or SIGTERM before all steps were saved
    stopped: bool = False  # by a Ctrl-C or SIGTERM, and all steps are saved
    format: Literal[1] = 1


def usual_step_s(seconds: Sequence[float]) -> float | None:
    """The median seconds of a run's steps without the first ones; None if there are no others."""
    settled = list(seconds)[SETTLING_STEPS:]
    return statistics.median(settled) if settled else None
