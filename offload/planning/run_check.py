"""Predicted against measured, for a run: what each tier held, RSS, and seconds per step.

    prediction.json    written before the first step: what the plan of the run was expected to take
    measured.json      written after the last: ledger peaks, peak RSS, seconds of a usual step
    metrics.jsonl      seconds of every step, also of a run that has not ended

Ratios are predicted over measured: 1.10 says that the prediction was 10 % more than what came.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offload.planning.disk_cache import whole
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
    rss_nbytes: int | None  # None: what a pass takes is not known
    seconds: float | None  # None: the speeds of the machine are not known
    bottleneck: str | None
    links: Mapping[str, LinkPrediction]
    bounds: tuple[str, ...] = ()  # tiers of which the most is predicted that can come
    missing: tuple[str, ...] = ()  # what is not predicted, and why

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Prediction:
        """What `to_json` wrote; ValueError, KeyError or TypeError if it is something else."""
        values = _values(text)
        seconds, bottleneck = values["seconds"], values["bottleneck"]
        return cls(
            tiers=_tiers(values["tiers"]),
            rss_nbytes=None if values["rss_nbytes"] is None else whole(values["rss_nbytes"]),
            seconds=None if seconds is None else _positive(seconds),
            bottleneck=None if bottleneck is None else str(bottleneck),
            links={
                str(name): LinkPrediction(float(link["seconds"]), whole(link["nbytes"]))
                for name, link in _mapping(values["links"]).items()
            },
            bounds=tuple(str(name) for name in values.get("bounds", ())),
            missing=tuple(str(reason) for reason in values.get("missing", ())),
        )


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
        values = _values(text)
        seconds = values["seconds"]
        return cls(
            tiers=_tiers(values["tiers"]),
            rss_nbytes=int(_positive(values["rss_nbytes"])),
            seconds=None if seconds is None else _positive(seconds),
            steps=whole(values["steps"]),
        )


@dataclass(frozen=True)
class Row:
    """One figure of both."""

    name: str  # a tier, `RSS` or `step`
    predicted: float
    measured: float
    unit: str  # bytes or seconds
    is_bound: bool = False  # predicted is the most that may come

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


@dataclass(frozen=True)
class RunCheck:
    """A run's rows: tiers that hold anything, RSS, and the step where both sides know it."""

    rows: tuple[Row, ...]
    steps: int
    finished: bool = True  # False: tiers and RSS are of the ends of steps, not peaks
    missing: tuple[str, ...] = ()  # rows that cannot be given, and why

    @property
    def line(self) -> str:
        """`predicted / measured: host 1.00, nvme 0.99, RSS 1.03, step 0.94`."""
        parts = [
            f"{row.name} {row.ratio:.2f}{' (a bound)' if row.is_bound else ''}" for row in self.rows
        ]
        return f"predicted / measured: {', '.join(parts) or 'nothing to compare yet'}"


def compare(prediction: Prediction, measured: Measured, *, finished: bool = True) -> RunCheck:
    """Rows of what both sides know and is not nothing."""
    rows = [
        Row(name, prediction.tiers[name], held, "bytes", name in prediction.bounds)
        for name, held in measured.tiers.items()
        if held and name in prediction.tiers
    ]
    if prediction.rss_nbytes is not None:
        rows.append(Row("RSS", prediction.rss_nbytes, measured.rss_nbytes, "bytes"))
    if prediction.seconds is not None and measured.seconds is not None:
        rows.append(Row("step", prediction.seconds, measured.seconds, "seconds"))
    return RunCheck(tuple(rows), measured.steps, finished, tuple(_missing(prediction, measured)))


def _missing(prediction: Prediction, measured: Measured) -> Iterator[str]:
    yield from prediction.missing
    if prediction.seconds is None and not prediction.missing:
        yield "step: not predicted: this machine's speed was not known when the run began"
    if prediction.seconds is not None and measured.seconds is None:
        yield f"step: not measured: the first {SETTLING_STEPS} steps do not count"


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
    """What metrics.jsonl says of a run that was cut short: the most that any step ended with."""
    path = folder / "metrics.jsonl"
    try:
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
        steps = [json.loads(line) for line in lines]
        seconds = usual_step_s([_positive(step["seconds"]) for step in steps])
        held = [_tiers(step["tiers"]) for step in steps]
        tiers = {name: max(each.get(name, 0) for each in held) for name in held[-1]}
        rss = max(int(_positive(step["rss_nbytes"])) for step in steps)
        return Measured(tiers, rss, seconds, len(steps))
    except IndexError:
        why = "no step has ended yet"
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = _why(path, error)
    raise ConfigError(
        f"{folder}: no step to compare with the prediction ({why}); train at least one"
    )


def _read(folder: Path, name: str, parse: Any) -> Any:
    path = folder / name
    try:
        return parse(path.read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder} cannot be checked: {_why(path, error)}; name the folder of a run of "
            "`offload train`, or of offload.initialize(..., run_folder=...)"
        ) from None


def _why(path: Path, error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{path.name}: {error.strerror}"
    return f"{path.name} is damaged"


def _mapping(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"{values!r} has no names")
    return values


def _tiers(values: Any) -> dict[str, int]:
    return {str(name): whole(nbytes) for name, nbytes in _mapping(values).items()}


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is not a number above 0")
    return float(value)


def _values(text: str) -> dict[str, Any]:
    values = json.loads(text)
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise ValueError(f"not of format {FORMAT}")
    return values
