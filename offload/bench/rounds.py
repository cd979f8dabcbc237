"""The order of measurements: every system once per round, each round beginning with another one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from offload.bench.record import Kind, Record, Row

T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Timed:
    """A system of one process. `run` makes a pass and gives its measures, `seconds` among them;
    `amounts` is what a pass does, by the rate that follows: {"bytes_per_s": ...}."""

    name: str
    kind: Kind
    run: Callable[[], Mapping[str, float]]
    amounts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)

    def row(self, passes: Sequence[Mapping[str, float]]) -> Row:
        measures = {name: [each[name] for each in passes] for name in passes[0]}
        for rate, amount in self.amounts.items():
            measures[rate] = [amount / seconds for seconds in measures["seconds"]]
        return Row(self.name, self.kind, measures, dict(self.facts), self.note)


def measure(record: Record, systems: Sequence[Timed], rounds: int, say: Say) -> None:
    """Measure the systems, and add a row for each."""
    passes = interleaved({system.name: system.run for system in systems}, rounds, say)
    record.rows += [system.row(passes[system.name]) for system in systems]


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


def moving(name: str, kind: Kind, nbytes: int, work: Callable[[], object], note: str = "") -> Timed:
    """A system of this process; a pass also returns all threads' user and system time."""

    def run() -> dict[str, float]:
        before = time.process_time()
        seconds = seconds_of(work)
        used_s = time.process_time() - before
        return {"seconds": seconds, "cpu_s_per_gb": used_s / nbytes * 1e9}

    return Timed(name, kind, run, {"bytes_per_s": float(nbytes)}, note)
