"""A bench's results: rows of measurements per round, and ratios taken within each round.

A machine's speed drifts, and all systems drift with it. So a ratio is never one of two medians: it
is the median of the ratios of the rounds, in each of which both systems ran: every system once,
each round beginning with another one.
"""

from __future__ import annotations

import enum
import math
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_json

from offload import __version__
from offload.checkpoint.format.disk import write_named
from offload.process import machine
from offload.tiers import accelerator

FORMAT = 2  # of the JSON; raised when a key changes its meaning: 1 had "ours" for "offload"
T = TypeVar("T")
Say = Callable[[str], None]
MIN_ROUNDS = 7  # fewer are a look, not a measurement


class Kind(enum.StrEnum):
    """The kind of a row."""

    LIMIT = "limit"  # what the hardware does without offload
    OFFLOAD = "offload"
    PEER = "peer"


@dataclass
class Row:
    """One system. `measures` are one value per round, `facts` one for the whole run.

    Names end in their unit: `seconds`, `bytes_per_s`, `peak_rss_nbytes`.
    A row without measures says in `note` why there are none.
    """

    name: str
    kind: Kind
    measures: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def measured(self) -> bool:
        return bool(self.measures)

    def median(self, measure: str) -> float:
        """The median over rounds; NaN for a measure that is missing."""
        values = self.measures.get(measure)
        return statistics.median(values) if values else math.nan

    def values(self, measure: str) -> list[float]:
        """The values of all rounds, or the one value of a fact. KeyError if it is neither."""
        if measure in self.facts:
            return [self.facts[measure]]
        return self.measures[measure]


@dataclass(frozen=True)
class Ratio:
    """The ratio of `measure` between the rows `of` and `to`, round by round."""

    of: str
    to: str
    measure: str
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


@dataclass
class Record:
    """The results of one run."""

    bench: str
    options: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=lambda: this_machine())

    def measured(self, name: str) -> Row | None:
        """The row of this name, if there is one and it was measured."""
        return next((row for row in self.rows if row.name == name and row.measured), None)

    def compare(self, of: str, to: str, measure: str) -> None:
        """Add the ratio of two rows, if both were measured."""
        above, below = self.measured(of), self.measured(to)
        if above is not None and below is not None:
            pairs = zip(above.values(measure), below.values(measure), strict=True)
            rounds = tuple(a / b for a, b in pairs)
            self.ratios.append(Ratio(of, to, measure, rounds))

    def note_rounds(self, rounds: int) -> None:
        """Say so if the medians rest on few rounds."""
        if rounds < MIN_ROUNDS:
            self.notes.append(
                f"{rounds} rounds only: a look, not a measurement; {MIN_ROUNDS} or more are"
            )

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values, the medians included."""
        rows = [
            {**asdict(row), "medians": {name: row.median(name) for name in row.measures}}
            for row in self.rows
        ]
        ratios = [{**asdict(each), "median": each.median} for each in self.ratios]
        own = {**asdict(self), "rows": rows, "ratios": ratios}
        return {"format": FORMAT, "offload": __version__, **own}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """The record of `to_dict`'s values."""
        return TypeAdapter(cls).validate_python(values)

    def write(self, path: Path, option: str = "--json") -> None:
        """Write JSON; what is not finite becomes null, since JSON has no NaN. PathError, naming
        `option`, if `path` cannot be written."""
        text = to_json(self.to_dict(), indent=1, inf_nan_mode="null").decode() + "\n"
        write_named(path, text, option)


def this_machine() -> dict[str, Any]:
    """The machine that was measured."""
    import torch

    described: dict[str, Any] = {
        "cpu": machine.cpu_model(),
        "cores": machine.cpu_count(),
        "memory_nbytes": machine.total_memory_nbytes(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    device = accelerator.default_device()
    if accelerator.is_accelerator(device):
        described["gpu"] = accelerator.of(device).facts(device).name
    return described


def interleaved(
    systems: Mapping[str, Callable[[], T]], rounds: int, say: Say
) -> dict[str, list[T]]:  # fmt: skip
    """Each system's results per round, without those of a first one that warms up.

        round 1   a b c        round 2   b c a        round 3   c a b        ...

    So no system always runs after the same one, whose heat, caches and dirty pages it inherits.
    """
    names = deque(systems)
    results: dict[str, list[T]] = {name: [] for name in systems}
    names.rotate(1)
    for number in range(rounds + 1):
        for name in names:
            say(f"{f'round {number} of {rounds}' if number else 'warming up'}: {name}")
            value = systems[name]()
            if number:
                results[name].append(value)
        names.rotate(-1)
    return results


def seconds_of(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
