"""`memest check`: what a run of `offload train` was predicted to take, beside what it took.

Ratios are predicted over measured: 1.10 means that the prediction was 10 % too high.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from offload.display.console import PlainConsole, table
from offload.display.words import duration
from offload.runs.metrics import MEASURED, PREDICTION, SETTLING_STEPS, Measured, Prediction
from offload.tiers.errors import ConfigError
from offload.tiers.units import format_bytes

# How far apart a prediction may be, by figure: beyond, the line is marked.
_TOLERANCES = {"RSS": 0.08, "step": 0.20}
_TOLERANCE = 0.03  # of a tier's ledger


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
    missing: str = ""  # why there is no row of the step


def check_run(folder: Path) -> RunCheck:
    """Compare predicted with measured figures of the run in `folder`, which has ended: those that
    both sides have and that are not 0. Without torch.

    Raises ConfigError, naming what is missing, if the folder has no run that can be checked.
    """
    prediction: Prediction = _read(folder, PREDICTION, Prediction.from_json)
    measured: Measured = _read(folder, MEASURED, Measured.from_json)
    rows = [
        Row(name, prediction.tiers[name], held, "bytes", name in prediction.bounds)
        for name, held in measured.tiers.items()
        if held and name in prediction.tiers
    ]
    rows.append(Row("RSS", prediction.rss_nbytes, measured.rss_nbytes, "bytes"))
    missing = ""
    if prediction.seconds is None:
        missing = "step: not predicted: this machine's speed was not known when the run began"
    elif measured.seconds is None:
        missing = f"step: not measured: the first {SETTLING_STEPS} steps do not count"
    else:
        rows.append(Row("step", prediction.seconds, measured.seconds, "seconds"))
    return RunCheck(tuple(rows), measured.steps, missing)


def print_check(folder: Path) -> None:
    """Print one line per figure. Raise ConfigError if the folder holds no checkable run."""
    check = check_run(folder)
    shown = table("", "predicted", "measured", "apart", numbers=range(1, 4))
    for row in check.rows:
        apart = row.ratio - 1
        far = abs(apart) > _TOLERANCES.get(row.name, _TOLERANCE)
        far = far and not (row.is_bound and apart > 0)
        shown.add_row(
            f"{row.name}, at most" if row.is_bound else row.name,
            _figure(row, row.predicted), _figure(row, row.measured),
            Text(f"{apart:+.1%}", style="yellow" if far else "green"),
        )  # fmt: skip
    PlainConsole().print(shown)
    if check.missing:
        print(check.missing)
    print(f"{check.steps:,} step{'' if check.steps == 1 else 's'}")


def _figure(row: Row, value: float) -> str:
    return duration(value) if row.unit == "seconds" else format_bytes(int(value))


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
