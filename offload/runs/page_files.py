"""Reads the files of a run's folder for its page: the rows of its steps, and one recorded step.

A run may have been killed in the middle of a line, be of another version, or have been edited, so
no value is trusted to have the right type: readable values are kept, damaged lines are counted.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.pages.pictures import Stretch

TRACE = "trace.json"
_MAX_LINE = 1 << 20  # characters
_MAX_NBYTES = 256 << 20  # of a file that is read whole
_MAX_NAMES = 64  # of figures
_MAX_NAME = 60  # characters
_MAX_LANES = 14
_GROUPS = ("tiers", "moved", "waited")

Key = tuple[str, str]  # a group and a name in it; the group of plain figures is ""
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PageRows:
    """The steps of one file in ascending order; the later one if a step was taken twice. Numbers
    are finite, or nan if unknown."""

    steps: Numbers = field(default_factory=lambda: np.empty(0))
    columns: Mapping[Key, Numbers] = field(default_factory=dict)
    damaged: int = 0  # lines that are no step
    nonfinite: Sequence[int] = ()  # steps whose loss was not finite: null, and not left out

    def column(self, name: str, group: str = "") -> Numbers:
        """The value of each step."""
        found = self.columns.get((group, name))
        return np.full(len(self.steps), np.nan) if found is None else found

    def known(self, name: str) -> list[float]:
        """The known values of a plain figure."""
        column = self.column(name)
        return [float(value) for value in column[~np.isnan(column)]]

    def sums(self, group: str) -> dict[str, float]:
        """The sum over all steps of each figure in a group; those that are 0 are left out."""
        sums = {name: float(np.nansum(c)) for (of, name), c in self.columns.items() if of == group}
        return {name: value for name, value in sums.items() if value > 0}

    def moved(self) -> dict[str, float]:
        """The bytes moved by each link. The count of a process starts at 0, so it starts again
        where a run was resumed."""
        found = {}
        for name in self.sums("moved"):
            counts = np.nan_to_num(self.column(name, "moved"))
            grown = np.diff(counts, prepend=0.0)
            found[name] = float(np.where(grown >= 0, grown, counts).sum())
        return found

    def step_seconds(self) -> float:
        """The seconds of all steps, which contain those in `waited`."""
        return float(np.nansum(np.maximum(self.column("seconds"), 0.0)))

    def elapsed_seconds(self) -> float:
        """The same, with the time between steps if it is known. The time before a process's first
        step belongs to no step."""
        since = np.diff(self.column("elapsed_seconds"), prepend=np.nan)
        since = np.where(since >= 0, since, 0.0)  # nan, too
        return float(np.maximum(np.nan_to_num(self.column("seconds")), since).sum())


def read_rows(path: Path) -> PageRows:
    """Read all steps in a file of metrics; none if there is no such file."""
    steps, damaged = array("d"), 0  # 8 bytes per figure, since a run may be long
    nonfinite: set[int] = set()
    columns: dict[Key, array[float]] = {}
    try:
        file = path.open(errors="replace")
    except OSError:
        return PageRows()
    with file:
        for line in _lines(file):
            values = _object(line)
            step = _number(values.get("step")) if values is not None else None
            if values is None or step is None or not 0 <= step <= 1 << 53:
                damaged += bool(line.strip())
                continue
            for key, number in _numbers(values).items():
                if key not in columns and len(columns) < _MAX_NAMES:
                    columns[key] = array("d", [math.nan]) * len(steps)
                if key in columns:
                    columns[key].append(number)
            steps.append(float(int(step)))
            (nonfinite.add if values.get("loss", 0) is None else nonfinite.discard)(int(step))
            for column in columns.values():
                if len(column) < len(steps):
                    column.append(math.nan)
    order = list(dict(sorted({step: place for place, step in enumerate(steps)}.items())).values())
    kept = {key: np.asarray(column)[order] for key, column in columns.items()}
    return PageRows(np.asarray(steps)[order], kept, damaged, sorted(nonfinite))


def _lines(file: Any) -> Iterator[str]:
    """Iterate over lines; overlong ones are cut."""
    while line := file.readline(_MAX_LINE):
        yield line
        while line and not line.endswith("\n"):
            line = file.readline(_MAX_LINE)


def read_object(path: Path) -> dict[str, Any] | None:
    """Read the JSON object in a file; None if there is none, or if it is too large."""
    try:
        if path.stat().st_size > _MAX_NBYTES:
            return None
        return _object(path.read_text(errors="replace"))
    except OSError:
        return None


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _numbers(values: Mapping[str, Any]) -> dict[Key, float]:
    """The known figures of a line. Those in groups are at least 0."""
    found: dict[Key, float] = {}
    for name, value in values.items():
        if name in _GROUPS and isinstance(value, dict):
            inner = ((within[:_MAX_NAME], _number(v)) for within, v in value.items())
            found |= {(name, within): max(0.0, n) for within, n in inner if n is not None}
        elif (number := _number(value)) is not None:
            found["", name[:_MAX_NAME]] = number
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e300 else None  # larger ones have no sum


# ---------------------------------------------------------------- one recorded step
@dataclass(frozen=True, slots=True)
class StepLanes:
    """One step: the stretches of each lane in seconds from its beginning, the model's thread
    first."""

    step: int
    seconds: float
    lanes: Mapping[str, Sequence[Stretch]]


def read_step(path: Path) -> StepLanes | None:
    """Read the recorded step of median length; None if the file is not a trace of offload."""
    events = (read_object(path) or {}).get("traceEvents")
    if not isinstance(events, list):
        return None
    events = [event for event in events if isinstance(event, dict)]
    names = {
        _lane(event): str(event["args"].get("name", ""))[:_MAX_NAME]
        for event in events
        if event.get("name") == "thread_name" and isinstance(event.get("args"), dict)
    }
    spans = [
        (names.get(_lane(each), ""), str(each.get("name", "")), *times)
        for each in events
        if (times := _times(each)) is not None
    ]
    steps = sorted((length, start, name) for lane, name, start, length in spans if lane == "steps")
    if not steps:
        return None
    whole, began, name = steps[(len(steps) - 1) // 2]
    lanes: dict[str, list[Stretch]] = {}
    for lane, what, start, length in spans:
        meaning = _meaning(lane, what)
        first, last = max(0.0, start - began), min(whole, start + length - began)
        if meaning and first < last:
            lanes.setdefault(lane, []).append(Stretch(meaning, first, last))
    shown = {lane: _joined(lanes[lane], whole) for lane in list(lanes)[:_MAX_LANES]}
    digits = name.removeprefix("step ")
    return StepLanes(int(digits) if digits.isdecimal() else 0, whole, shown)


def _lane(event: Mapping[str, Any]) -> str:
    return f"{event.get('pid')}/{event.get('tid')}"


def _times(event: Mapping[str, Any]) -> tuple[float, float] | None:
    """Start and length of a span in seconds; None for any other event."""
    at, length = _number(event.get("ts")), _number(event.get("dur"))
    if event.get("ph") != "X" or at is None or length is None or length <= 0:
        return None
    return at / 1e6, length / 1e6


def _meaning(lane: str, name: str) -> str:
    """The meaning of a span's colour; empty between steps, and for what is no lane."""
    lane = lane.partition(" (")[0]
    if lane in ("", "steps"):
        return ""
    if name.startswith("wait"):
        return "network" if name.startswith("wait for ranks") else "waiting"
    if lane == "model's thread":
        begins = {"forward": "compute", "backward": "backward", "step": "update"}
        return begins.get(name.partition(" ")[0], "")
    if lane in ("nvme read", "nvme write", "host to device", "device to host"):
        return lane
    return "update" if lane.startswith("update") else "network"


def _joined(stretches: Sequence[Stretch], whole: float) -> list[Stretch]:
    """Join neighbours of one colour whose gap is too small to be seen."""
    found: list[Stretch] = []
    for each in stretches:
        last = found[-1] if found else None
        if last and last.meaning == each.meaning and each.start - last.stop < whole / 1000:
            found[-1] = Stretch(each.meaning, last.start, max(last.stop, each.stop))
        else:
            found.append(each)
    return found
