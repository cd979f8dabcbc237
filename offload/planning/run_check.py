"""Predicted against measured, for a run: what each tier held, RSS, and seconds per step.

    prediction.json    written before the first step: what the plan of the run was expected to take
    measured.json      written after the last: ledger peaks, peak RSS, seconds of a usual step
    metrics.jsonl      seconds of every step, also of a run that has not ended

Ratios are predicted over measured: 1.10 says that the prediction was 10 % more than what came.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offload.tiers.errors import ConfigError

PREDICTION, MEASURED = "prediction.json", "measured.json"
FORMAT = 1
SETTLING_STEPS = 2  # the first learns the order of uses, the second is the first to fetch ahead


@dataclass(frozen=True)
class LinkPrediction:
    """What one link has to do in a step."""

    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Prediction:
    """Peaks in bytes, and one step of a long run."""

    tiers: Mapping[str, int]  # the ledgers' peaks
    rss_nbytes: int
    seconds: float | None  # None: the speeds of the machine are not known
    bottleneck: str | None
    links: Mapping[str, LinkPrediction]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Prediction:
        """What `to_json` wrote; ValueError, KeyError or TypeError if it is something else."""
        values = _values(text)
        links = {name: LinkPrediction(**link) for name, link in values.pop("links").items()}
        return cls(links=links, **values)


@dataclass(frozen=True)
class Measured:
    """What came: peaks in bytes, seconds of a usual step (None: too few steps)."""

    tiers: Mapping[str, int]
    rss_nbytes: int
    seconds: float | None
    steps: int

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Measured:
        """What `to_json` wrote; ValueError, KeyError or TypeError if it is something else."""
        return cls(**_values(text))


@dataclass(frozen=True)
class Row:
    """One figure of both."""

    name: str  # a tier, `RSS` or `step`
    predicted: float
    measured: float
    unit: str  # bytes or seconds

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


@dataclass(frozen=True)
class RunCheck:
    """A run's rows: tiers that hold anything, RSS, and the step where both sides know it."""

    rows: tuple[Row, ...]
    steps: int
    finished: bool = True  # False: tiers and RSS are of the last step, not peaks of the whole run

    @property
    def line(self) -> str:
        """`predicted / measured: host 1.00, nvme 0.99, RSS 1.03, step 0.94`."""
        parts = [f"{row.name} {row.ratio:.2f}" for row in self.rows]
        return f"predicted / measured: {', '.join(parts) or 'nothing to compare yet'}"


def compare(prediction: Prediction, measured: Measured, *, finished: bool = True) -> RunCheck:
    """Rows of what both sides know and is not nothing."""
    rows = [
        Row(name, prediction.tiers.get(name, 0), held, "bytes")
        for name, held in measured.tiers.items()
        if held
    ]
    rows.append(Row("RSS", prediction.rss_nbytes, measured.rss_nbytes, "bytes"))
    if prediction.seconds is not None and measured.seconds is not None:
        rows.append(Row("step", prediction.seconds, measured.seconds, "seconds"))
    return RunCheck(tuple(rows), measured.steps, finished)


def usual_step_s(seconds: Sequence[float]) -> float | None:
    """Of the steps of a run, the first ones not counted; None where there are no others."""
    settled = list(seconds)[SETTLING_STEPS:]
    return statistics.median(settled) if settled else None


def check_run(folder: Path) -> RunCheck:
    """Predicted against measured for the run in `folder`, ended or not. Needs no torch.

    ConfigError, saying what is missing, where the folder holds no run that can be checked.
    """
    prediction = _read(folder, PREDICTION, Prediction.from_json)
    if (folder / MEASURED).exists():
        return compare(prediction, _read(folder, MEASURED, Measured.from_json))
    return compare(prediction, _so_far(folder), finished=False)


def _so_far(folder: Path) -> Measured:
    """What metrics.jsonl says of a run that was cut short: its last step stands for the peaks."""
    path = folder / "metrics.jsonl"
    try:
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
        steps = [json.loads(line) for line in lines]
        last = steps[-1]
        seconds = usual_step_s([float(step["seconds"]) for step in steps])
        tiers = {str(name): int(held) for name, held in last["tiers"].items()}
        return Measured(tiers, int(last["rss_nbytes"]), seconds, len(steps))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{folder}: no step to compare with the prediction ({_why(path, error)}); train at "
            "least one"
        ) from None


def _read(folder: Path, name: str, parse: Any) -> Any:
    path = folder / name
    try:
        return parse(path.read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder} cannot be checked: {_why(path, error)}; name the folder of a run of "
            "`offload train`"
        ) from None


def _why(path: Path, error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{path.name}: {error.strerror}"
    return f"{path.name} is damaged"


def _values(text: str) -> dict[str, Any]:
    values = json.loads(text)
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise ValueError(f"not of format {FORMAT}")
    return values
