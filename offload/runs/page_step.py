"""The waterfall of a run's page: the lanes of one recorded step, read from trace.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from offload.pages.html_page import key
from offload.pages.svg import drawing, mark, stretch
from offload.pages.ticks import ticks
from offload.planning.choice.durations import duration
from offload.runs.page_rows import read_object
from offload.tiers.units import format_bytes

TRACE = "trace.json"
_MOST_ROWS = 14
_MOST_PIECES = 240  # of one row; what is shorter than a pixel is drawn with its neighbours
_LEAST = 1.0 / 900  # of the step: about a pixel
_HEIGHT = 22


@dataclass(slots=True)
class Span:
    """A stretch of a lane, in seconds since the step's beginning."""

    name: str
    meaning: str  # of its colour
    start_s: float
    stop_s: float
    nbytes: float = 0.0
    count: int = 1  # events in it

    def tip(self) -> str:
        what = self.name if self.count == 1 else f"{self.name}, and {self.count - 1} more"
        moved = f", {format_bytes(int(self.nbytes))}" if self.nbytes else ""
        return f"{what}: {duration(self.stop_s - self.start_s)}{moved}"


@dataclass(frozen=True, slots=True)
class Waterfall:
    """One step: rows of spans by name, the model's thread first."""

    step: int
    seconds: float
    rows: Sequence[tuple[str, Sequence[Span]]]

    def html(self) -> str:
        """Return the rows over one axis, and the key of the colours."""
        parts = []
        for name, spans in self.rows:
            busy = _covered(spans)
            label = f"{name}: busy {duration(busy)} of {duration(self.seconds)}"
            axis = f'<rect y="{_HEIGHT + 1}" width="100%" height="1" fill="var(--line)"/>'
            pieces = [self._piece(span) for span in spans]
            parts.append(f"<span>{escape(name)}</span>{drawing('lane', label, [axis, *pieces])}")
        marks = drawing("axis", "time", map(mark, ticks(self.seconds)))
        used = dict.fromkeys(span.meaning for _, spans in self.rows for span in spans)
        keys = key((meaning, _SAID.get(meaning, meaning)) for meaning in used)
        rows = "".join(parts)
        return f'<div class="rows">{rows}<span class="none"></span>{marks}</div>{keys}'

    def _piece(self, span: Span) -> str:
        start, stop = span.start_s / self.seconds, span.stop_s / self.seconds
        way, _, group = span.name.partition(" ")
        label = group if way in ("forward", "backward") else span.name  # the colour says the way
        return stretch(start, stop, _HEIGHT, span.meaning, label, span.tip())


_SAID = {
    "compute": "forward", "update": "optimizer", "network": "collectives", "waiting": "waits",
}  # fmt: skip


def read_waterfall(path: Path) -> Waterfall | None:
    """Read the recorded step of median length; None if the file is not a trace of offload."""
    trace = read_object(path)
    events = trace.get("traceEvents") if trace is not None else None
    if not isinstance(events, list):
        return None
    events = [event for event in events if isinstance(event, dict)]
    names = _row_names(events)
    spans = [event for event in events if event.get("ph") == "X" and _times(event) is not None]
    steps = [event for event in spans if names.get(_tid(event)) == "steps"]
    if not steps:
        return None
    steps.sort(key=lambda event: float(event["dur"]))
    chosen = steps[(len(steps) - 1) // 2]
    start, length = float(chosen["ts"]), float(chosen["dur"])
    if length <= 0:
        return None
    rows: dict[str, list[Span]] = {}
    for event in spans:
        lane = names.get(_tid(event), "")
        if not lane or lane == "steps":
            continue
        began, took = float(event["ts"]) - start, float(event["dur"])
        name = str(event.get("name", ""))[:80]
        meaning = _meaning(lane, name)
        if meaning and began < length and began + took > 0:
            start_s, stop_s = max(0.0, began) / 1e6, min(length, began + took) / 1e6
            found = Span(name, meaning, start_s, stop_s, _nbytes(event))
            rows.setdefault(lane, []).append(found)
    shown = [(name, _joined(rows[name], length / 1e6)) for name in rows]
    return Waterfall(_step_number(chosen), length / 1e6, shown[:_MOST_ROWS])


def _row_names(events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    found = {}
    for event in events:
        args = event.get("args")
        if event.get("name") == "thread_name" and isinstance(args, dict):
            found[_tid(event)] = str(args.get("name", ""))[:60]
    return found


def _tid(event: Mapping[str, Any]) -> str:
    return f"{event.get('pid')}/{event.get('tid')}"


def _times(event: Mapping[str, Any]) -> tuple[float, float] | None:
    at, length = event.get("ts"), event.get("dur")
    numbers = all(isinstance(n, (int, float)) and -1e15 < n < 1e15 for n in (at, length))
    return (float(at), float(length)) if numbers else None  # type: ignore[arg-type]


def _nbytes(event: Mapping[str, Any]) -> float:
    args = event.get("args")
    found = args.get("bytes") if isinstance(args, dict) else None
    return float(found) if isinstance(found, int) and 0 <= found < 1 << 62 else 0.0


def _step_number(event: Mapping[str, Any]) -> int:
    digits = str(event.get("name", "")).removeprefix("step ")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 16 else 0


def _meaning(lane: str, name: str) -> str:
    """The meaning of a span's colour; empty between steps."""
    lane = lane.partition(" (")[0]
    if name.startswith("wait for ranks"):
        return "network"
    if name.startswith("wait"):
        return "waiting"
    if lane == "model's thread":
        begins = {"forward": "compute", "backward": "backward", "step": "update"}
        return begins.get(name.partition(" ")[0], "")  # between steps
    if lane in ("nvme read", "nvme write", "host to device", "device to host"):
        return lane
    return "update" if lane.startswith("update") else "network"


def _joined(spans: Sequence[Span], length_s: float) -> list[Span]:
    """Merge spans too short to be seen with neighbours of the same colour, in drawing order."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if (
            last is not None
            and last.meaning == span.meaning
            and span.start_s - last.stop_s < _LEAST * length_s
            and min(span.stop_s - span.start_s, last.stop_s - last.start_s) < _LEAST * length_s * 3
            and span.start_s >= last.start_s
        ):
            if span.stop_s - span.start_s > last.stop_s - last.start_s:
                last.name = span.name
            last.stop_s = max(last.stop_s, span.stop_s)
            last.nbytes += span.nbytes
            last.count += 1
        else:
            found.append(span)
    if len(found) > _MOST_PIECES:
        longest = sorted(found, key=lambda span: span.start_s - span.stop_s)[:_MOST_PIECES]
        kept = set(map(id, longest))
        found = [span for span in found if id(span) in kept]
    return found


def _covered(spans: Sequence[Span]) -> float:
    """The seconds covered by at least one span."""
    covered, reached = 0.0, 0.0
    for span in sorted(spans, key=lambda each: each.start_s):
        covered += max(0.0, span.stop_s - max(span.start_s, reached))
        reached = max(reached, span.stop_s)
    return covered
