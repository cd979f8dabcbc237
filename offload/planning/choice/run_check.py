"""The comparison of a run with its prediction: bytes per tier, RSS, and seconds per step.

    prediction.json    written before the first step: the expected figures of the run's plan
    measured.json      written after the last: ledger peaks, peak RSS, seconds of a usual step

Ratios are predicted over measured: 1.10 means that the prediction was 10 % too high.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    rss_nbytes: Nbytes
    seconds: Positive | None  # None: the speeds of the machine are not known
    bounds: tuple[str, ...] = ()  # tiers of which the most is predicted that can come


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
    missing: tuple[str, ...] = ()  # rows that cannot be given, and why


def compare(prediction: Prediction, measured: Measured) -> RunCheck:
    """Compare the figures that both sides have and that are not 0."""
    rows = [
        Row(name, prediction.tiers[name], held, "bytes", name in prediction.bounds)
        for name, held in measured.tiers.items()
        if held and name in prediction.tiers
    ]
    rows.append(Row("RSS", prediction.rss_nbytes, measured.rss_nbytes, "bytes"))
    if prediction.seconds is not None and measured.seconds is not None:
        rows.append(Row("step", prediction.seconds, measured.seconds, "seconds"))
    return RunCheck(tuple(rows), measured.steps, tuple(_missing(prediction, measured)))


def _missing(prediction: Prediction, measured: Measured) -> Iterator[str]:
    if prediction.seconds is None:
        yield "step: not predicted: this machine's speed was not known when the run began"
    if prediction.seconds is not None and measured.seconds is None:
        yield f"step: not measured: the first {SETTLING_STEPS} steps do not count"


def usual_step_s(seconds: Sequence[float]) -> float | None:
    """The median seconds of a run's steps without the first ones; None if there are no others."""
    settled = list(seconds)[SETTLING_STEPS:]
    return statistics.median(settled) if settled else None


def check_run(folder: Path) -> RunCheck:
    """Compare predicted with measured figures of the run in `folder`, which has ended, without
    torch.

    Raises ConfigError, naming what is missing, if the folder has no run that can be checked.
    """
    prediction = _read(folder, PREDICTION, Prediction.from_json)
    return compare(prediction, _read(folder, MEASURED, Measured.from_json))


def _read(folder: Path, name: str, parse: Callable[[str], Any]) -> Any:
    path = folder / name
    try:
        return parse(path.read_text())
    except ValueError:
        why = f"{name} is damaged"
    except OSError as error:
        why = f"{name}: {error.strerror}"
        if name == MEASURED and isinstance(error, FileNotFoundError):
            why = f"{name} is written when a run ends, and this one was killed or still trains"
    raise ConfigError(
        f"{folder} cannot be checked: {why}; name the folder of a run of `offload train`"
    )
