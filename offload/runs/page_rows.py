"""Reads a run's folder for its page: readable values are kept, and damaged lines are counted.

A run may have been killed in the middle of a line, be of another version, or have been edited, so
no value is trusted to have the right type.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MOST_LINE = 1 << 20  # characters
_MOST_NBYTES = 256 << 20  # of a file that is read whole
_MOST_NAMES = 64  # of figures
_MOST_NAME = 60  # characters
_GROUPS = ("tiers", "moved", "waited", "links")
_NAN = math.nan

Key = tuple[str, str]  # a group and a name in it; the group of plain figures is ""


@dataclass(frozen=True, slots=True)
class PageRows:
    """The steps of one file in ascending order; the later one if a step was taken twice. A number
    is finite, or None if unknown. A column has 8 bytes per step, since a run may be long."""

    steps: Sequence[float] = ()
    columns: Mapping[Key, Sequence[float]] = field(default_factory=dict)  # nan: not known
    damaged: int = 0  # lines that are no step
    nonfinite: Sequence[int] = ()  # steps whose loss was not finite: null, and not left out

    def numbers(self, name: str, group: str = "") -> list[float | None]:
        """The values of every step."""
        column = self.columns.get((group, name))
        if column is None:
            return [None] * len(self.steps)
        return [None if y != y else y for y in column]

    def known(self, name: str) -> list[float]:
        """The known values."""
        return [y for y in self.columns.get(("", name), ()) if y == y]

    def names(self, group: str) -> list[str]:
        """The names in a group of figures that have nonzero values, in the order of the file."""
        return [
            name for (of, name), column in self.columns.items()
            if of == group and any(y > 0 for y in column)
        ]  # fmt: skip

    def growth(self, group: str, name: str) -> list[float]:
        """The growth of a count in each step. The count starts at 0 with each process, so it starts
        again where a run was resumed."""
        return list(_growth(y or 0.0 for y in self.numbers(name, group)))

    def seconds(self) -> list[float]:
        """The seconds of each step, including those since the step before if known. The time before
        a process's first step belongs to no step."""
        found, before = [], math.inf
        for own, now in zip(self.numbers("seconds"), self.numbers("elapsed_seconds"), strict=True):
            since = 0.0 if now is None or now < before else now - before
            found.append(max(own or 0.0, since))
            before = math.inf if now is None else now
        return found


def _growth(counts: Iterable[float]) -> Iterator[float]:
    before = 0.0
    for now in counts:
        yield now - before if now >= before else now
        before = now


def read_rows(path: Path) -> PageRows:
    """Read all steps in a file of metrics; none if there is no such file."""
    steps, damaged = array("d"), 0
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
                if key not in columns and len(columns) < _MOST_NAMES:
                    columns[key] = array("d", [_NAN]) * len(steps)
                if key in columns:
                    columns[key].append(number)
            steps.append(float(int(step)))
            (nonfinite.add if values.get("loss", 0) is None else nonfinite.discard)(int(step))
            for column in columns.values():
                if len(column) < len(steps):
                    column.append(_NAN)
    last = {step: place for place, step in enumerate(steps)}
    order = [last[step] for step in sorted(last)]
    if order == list(range(len(steps))):
        return PageRows(list(steps), columns, damaged, sorted(nonfinite))
    kept = {key: array("d", (column[place] for place in order)) for key, column in columns.items()}
    return PageRows(sorted(last), kept, damaged, sorted(nonfinite))


def _lines(file: Any) -> Iterator[str]:
    """Iterate over lines; overlong ones are cut."""
    while line := file.readline(_MOST_LINE):
        yield line
        while line and not line.endswith("\n"):
            line = file.readline(_MOST_LINE)


def read_object(path: Path) -> Mapping[str, Any] | None:
    """Read the JSON object in a file; None if there is none, or if it is too large."""
    try:
        if path.stat().st_size > _MOST_NBYTES:
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
            inner = ((within[:_MOST_NAME], _number(v)) for within, v in value.items())
            found |= {(name, within): max(0.0, n) for within, n in inner if n is not None}
        elif (number := _number(value)) is not None:
            found["", name[:_MOST_NAME]] = number
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def bucketed(values: Sequence[float], buckets: int) -> list[float]:
    """Sums over `buckets` stretches of neighbours, or the values themselves if there are fewer."""
    if len(values) <= buckets:
        return list(values)
    edges = [number * len(values) // buckets for number in range(buckets + 1)]
    return [sum(values[edges[n] : edges[n + 1]]) for n in range(buckets)]
