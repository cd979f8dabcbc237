"""The comparison of a run with its prediction: bytes per tier, RSS, and seconds per step.

    prediction.json    written before the first step: the expected figures of the run's plan
    measured.json      written after the last: ledger peaks, peak RSS, seconds of a usual step
    metrics.jsonl      seconds of every step, also of a run that has not ended

Ratios are predicted over measured: 1.10 means that the prediction was 10 % too high.
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter

from offload.planning.machine.disk_cache import Nbytes, Positive
from offload.tiers.errors import ConfigError

PREDICTION, MEASURED = "prediction.json", "measured.json"
FORMAT = 1
SETTLING_STEPS = 2  # the first learns the order of uses, the second is the first to fetch ahead


class _Kept:
    """A dataclass that is stored as JSON."""

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the text that `to_json` wrote. Raise ValueError for any other text."""
        values = json.loads(text)
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
        return TypeAdapter(cls).validate_python(values)


@dataclass(frozen=True)
class Prediction(_Kept):
    """The predicted peaks in bytes, and one step of a long run."""

    tiers: Mapping[str, Nbytes]  # the ledgers' peaks
    rss_nbytes: Nbytes | None  # None: what a pass takes is not known
    seconds: Positive | None  # None: the speeds of the machine are not known
    bounds: tuple[str, ...] = ()  # tiers of which the most is predicted that can come
    missing: tuple[str, ...] = ()  # what is not predicted, and why


@dataclass(frozen=True)
class Measured(_Kept):
    """The measured peaks in bytes and seconds of a usual step (None: too few steps)."""

    tiers: Mapping[str, Nbytes]
    rss_nbytes: Annotated[Nbytes, Field(gt=0)]
    seconds: Positive | None
    steps: Nbytes
    cut_short: bool = False  # by an error, or by a Ctrl-C or SIGTERM before all steps were saved
    stopped: bool = False  # by a Ctrl-C or SIGTERM, and all steps are saved


@dataclass(frozen=True)
class _Step:
    """The part of a line of metrics.jsonl that is read."""

    seconds: Positive
    tiers: Mapping[str, Nbytes]
    rss_nbytes: Annotated[Nbytes, Field(gt=0)]


@dataclass(frozen=True)
class Row:
    """One figure, predicted and measured."""

    name: str  # a tier, `RSS` or `step`
    predicted: float
    measured: float
    unit: str  # bytes or seconds
    is_bound: bool = False  # predicted is the most that may come

    @property
    def ratio(self) -> float:
        """The predicted figure divided by the measured one."""
        return self.predicted / self.measured


@dataclass(frozen=True)
class RunCheck:
    """The rows of a run: tiers that hold anything, RSS, and the step if both sides have it."""

    rows: tuple[Row, ...]
    steps: int
    finished: bool = True  # False: tiers and RSS are of the ends of steps, not peaks
    missing: tuple[str, ...] = ()  # rows that cannot be given, and why

    @property
    def line(self) -> str:
        """The figures: `predicted / measured: host 1.00, nvme 0.99, RSS 1.03, step 0.94`."""
        parts = [
            f"{row.name} {row.ratio:.2f}{' (a bound)' if row.is_bound else ''}" for row in self.rows
        ]
        return f"predicted / measured: {', '.join(parts) or 'nothing to compare yet'}"


def compare(
    prediction: Prediction, measured: Measured, *, finished: bool = True, step: str = "step"
) -> RunCheck:  # fmt: skip
    """Compare the figures that both sides have and that are not 0. `step` names the timed unit."""
    rows = [
        Row(name, prediction.tiers[name], held, "bytes", name in prediction.bounds)
        for name, held in measured.tiers.items()
        if held and name in prediction.tiers
    ]
    if prediction.rss_nbytes is not None:
        rows.append(Row("RSS", prediction.rss_nbytes, measured.rss_nbytes, "bytes"))
    if prediction.seconds is not None and measured.seconds is not None:
        rows.append(Row(step, prediction.seconds, measured.seconds, "seconds"))
    return RunCheck(tuple(rows), measured.steps, finished, tuple(_missing(prediction, measured)))


def _missing(prediction: Prediction, measured: Measured) -> Iterator[str]:
    yield from prediction.missing
    if prediction.seconds is None and not prediction.missing:
        yield "step: not predicted: this machine's speed was not known when the run began"
    if prediction.seconds is not None and measured.seconds is None:
        yield f"step: not measured: the first {SETTLING_STEPS} steps do not count"


def usual_step_s(seconds: Sequence[float]) -> float | None:
    """The median seconds of a run's steps without the first ones; None if there are no others."""
    settled = list(seconds)[SETTLING_STEPS:]
    return statistics.median(settled) if settled else None


class StepTimes:
    """The step times of a running run, in seconds; of a long run, those of the last steps."""

    def __init__(self) -> None:
        self.count = 0
        self._settled: deque[float] = deque(maxlen=1000)

    def note(self, seconds: float) -> None:
        """Record a step that has been taken."""
        self.count += 1
        if self.count > SETTLING_STEPS:
            self._settled.append(seconds)

    @property
    def usual_s(self) -> float | None:
        """The median as in `usual_step_s`."""
        return statistics.median(self._settled) if self._settled else None


def check_run(folder: Path) -> RunCheck:
    """Compare predicted with measured figures of the run in `folder`, ended or not, without torch.

    Raises ConfigError, naming what is missing, if the folder has no run that can be checked.
    """
    prediction = _read(folder, PREDICTION, Prediction.from_json)
    if (folder / MEASURED).exists():
        return compare(prediction, _read(folder, MEASURED, Measured.from_json))
    return compare(prediction, _so_far(folder), finished=False)


def _so_far(folder: Path) -> Measured:
    """The measurement of an unfinished run from metrics.jsonl: its largest figures so far."""
    path = folder / "metrics.jsonl"
    try:
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
        steps = TypeAdapter(list[_Step]).validate_python([json.loads(line) for line in lines])
        names = steps[-1].tiers
        tiers = {name: max(step.tiers.get(name, 0) for step in steps) for name in names}
        seconds = usual_step_s([step.seconds for step in steps])
        return Measured(tiers, max(step.rss_nbytes for step in steps), seconds, len(steps))
    except IndexError:
        why = "no step has ended yet"
    except (OSError, ValueError) as error:
        why = _why(path, error)
    raise ConfigError(
        f"{folder}: no step to compare with the prediction ({why}); train at least one"
    )


def _read(folder: Path, name: str, parse: Any) -> Any:
    path = folder / name
    try:
        return parse(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} cannot be checked: {_why(path, error)}; name the folder of a run of "
            "`offload train`, or of offload.initialize(..., run_folder=...)"
        ) from None


def _why(path: Path, error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{path.name}: {error.strerror}"
    return f"{path.name} is damaged"
