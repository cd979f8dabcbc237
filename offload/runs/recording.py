"""A recording of an engine's last steps, and the file that https://ui.perfetto.dev shows.

The file is in the Trace Event Format: JSON with a list `traceEvents`. A lane is a thread there;
what overlaps on one lane is shown on several rows of it. Times are microseconds since the first
recorded step began, bytes are arguments of an event, bytes that tiers hold are counters.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from offload.config.paths import StrPath, path_of
from offload.swap.threads.recorder import MODEL, MOST_EVENTS, Event, Held, RecordedStep, Recorder
from offload.tiers.errors import StateError

_log = logging.getLogger("offload")

_ORDER = (
    MODEL, "update thread", "updates", "gather thread", "reduce thread", "nvme read", "nvme write",
    "host to device", "device to host",
)  # fmt: skip


def _rows_of(events: Iterable[Event]) -> list[list[Event]]:
    """Arrange events, sorted by beginning, on the fewest rows without partial overlaps."""
    rows: list[list[Event]] = []
    open_: list[list[float]] = []  # of each row, the ends of the events around now
    for event in events:
        for row, ends in zip(rows, open_, strict=True):
            while ends and ends[-1] <= event.start_s:
                ends.pop()
            if not ends or event.stop_s <= ends[-1]:
                row.append(event)
                ends.append(event.stop_s)
                break
        else:
            rows.append([event])
            open_.append([event.stop_s])
    return rows


class Recording:
    """A recording of one engine, from its creation until `stop`, or until no reference to it is
    left. A context manager."""

    def __init__(
        self, steps: int, held: Callable[[], Mapping[str, int]],
        tell: Callable[[Recorder | None], None],
    ) -> None:  # fmt: skip
        """Keep the last `steps` steps. `tell` passes the recorder to everything that reports
        events, and None at the end."""
        if not isinstance(steps, int) or steps < 1:
            raise StateError(f"a recording of {steps!r} steps; record a whole number, 1 or more")
        self._recorder = Recorder(steps, held)
        tell(self._recorder)
        self._end = weakref.finalize(self, _end, self._recorder, tell)

    @property
    def ended_steps(self) -> int:
        """Steps that have ended since the recording began, kept or not."""
        return self._recorder.ended_steps

    def stop(self) -> None:
        """Stop recording. Calling it again does nothing."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self.stop()

    def write(self, path: StrPath, *, rank: int = 0) -> None:
        """Write the whole steps so far as a trace (see the top of this file). Raises StateError if
        no step has ended yet, OSError if the file cannot be written."""
        path_of(path, "path").write_text(self.trace(rank))

    def trace(self, rank: int = 0) -> str:
        """Return the text of that file; `rank` is the number of the process in it. StateError if no
        step has ended yet."""
        recorder = self._recorder
        steps = list(recorder.steps)
        if not steps:
            raise StateError("no step has ended since the recording began: take a step first")
        first, last = steps[0].start_s, steps[-1].stop_s
        events = [
            replace(e, start_s=max(e.start_s, first))
            for e in list(recorder.events) if e.stop_s > first and e.start_s < last
        ]  # fmt: skip
        truncated = len(recorder.events) == MOST_EVENTS  # the first step lacks its first events
        if truncated:
            _log.warning(
                "more than %d events in %d steps: the earliest are left out of the recording; "
                "record fewer steps", MOST_EVENTS, len(steps),
            )  # fmt: skip
        # of two that begin at once the longer one is around the other
        events.sort(key=lambda event: (event.start_s, -event.stop_s))
        held = [each for each in list(recorder.held) if first <= each.at_s <= last]
        other = {"steps": [step.number for step in steps], "truncated": truncated}
        lines = ",\n".join(json.dumps(each) for each in _trace_events(rank, steps, events, held))
        return (
            f'{{"traceEvents":[\n{lines}\n],"displayTimeUnit":"ms",'
            f'"otherData":{json.dumps(other)}}}\n'
        )


def _end(recorder: Recorder, tell: Callable[[Recorder | None], None]) -> None:
    recorder.stopped = True
    tell(None)


def _trace_events(
    pid: int, steps: Sequence[RecordedStep], events: Sequence[Event], held: Iterable[Held]
) -> Iterator[dict[str, Any]]:
    start = steps[0].start_s

    def micros(at_s: float) -> float:
        return round((at_s - start) * 1e6, 3)

    def named(tid: int, what: str, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}

    yield named(0, "process_name", name=f"offload, rank {pid}")
    rows = [("steps", [Event("steps", f"step {s.number}", s.start_s, s.stop_s) for s in steps])]
    order = {name: number for number, name in enumerate(_ORDER)}
    for lane in sorted({e.lane for e in events}, key=lambda name: (order.get(name, 99), name)):
        found = _rows_of(event for event in events if event.lane == lane)
        rows += [(lane if not n else f"{lane} ({n + 1})", row) for n, row in enumerate(found)]
    for tid, (name, row) in enumerate(rows, 1):
        yield named(tid, "thread_name", name=name)
        yield named(tid, "thread_sort_index", sort_index=tid)
        for event in row:
            began = micros(event.start_s)
            yield {
                "ph": "X", "pid": pid, "tid": tid, "name": event.name, "cat": event.lane,
                "ts": began, "dur": round(micros(event.stop_s) - began, 3),
                "args": _arguments(event),
            }  # fmt: skip
    for each in held:
        for tier, nbytes in each.nbytes.items():
            yield {
                "ph": "C", "pid": pid, "name": f"{tier} holds", "ts": micros(each.at_s),
                "args": {"bytes": nbytes},
            }  # fmt: skip


def _arguments(event: Event) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if event.nbytes:
        found["bytes"] = event.nbytes
        if event.stop_s > event.start_s:
            found["GB/s"] = round(event.nbytes / (event.stop_s - event.start_s) / 1e9, 3)
    if event.detail:
        found["for"] = event.detail
    return found
