"""Bytes and seconds as bars, each set of them on one scale.

Places differ a thousandfold in size, so they are drawn twice: each on the scale of its own
capacity, where all capacities end at the same line, and all together on one scale of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from offload.pages.ticks import Tick, byte_ticks, ticks
from offload.planning.plan.estimate import MemoryClass, PlaceEstimate, StepEstimate
from offload.planning.step.step_time import COMPUTE, OPTIMIZER
from offload.tiers.units import format_bytes
from offload.tools.memest.show.sheet import Bar, Bars, Piece
from offload.tools.memest.show.view import duration, filled, share, used_text

LEAST_WIDTH = 0.004  # of any piece, so that it can be seen, and pointed at
_MOST_CAPACITIES = 3.0  # the length of a drawing: longer bars are broken off
_FEW_TICKS = 3  # so that their texts have room on a narrow page
_BROKEN = f"a broken bar goes on beyond {_MOST_CAPACITIES:g} capacities"
_OF_BYTES = "a line is a capacity; one that is not drawn lies beyond the longest bar"
_LATER = "right of the line is what a step leaves to be done during the next one"
_OF_CAPACITY = "each bar on the scale of its own place: a full one ends at capacity"


ValueText = Callable[[PlaceEstimate], str]


@dataclass(frozen=True)
class Held:
    """A place with a name. `short`: it cannot hold its part."""

    name: str
    place: PlaceEstimate
    short: bool

    @staticmethod
    def of(name: str, place: PlaceEstimate) -> Held:
        return Held(name, place, place.peak_nbytes > place.capacity_nbytes)


def capacity_bars(
    title: str, held: Sequence[Held], about: str = _OF_CAPACITY, *, value: ValueText = used_text
) -> Bars:
    """Draw the bytes in places by class, each against its capacity. `value`: the text beside a
    bar."""
    there = [filled(each.place) for each in held if each.place.capacity_nbytes]
    length = min(_MOST_CAPACITIES, max([1.0, *there])) if there else 1.0
    bars = tuple(_of_capacity(each, length, value(each.place)) for each in held)
    marks = _capacity_ticks(length) if there else ()
    if any(bar.broken for bar in bars):
        about = f"{about}; {_BROKEN}" if about else _BROKEN
    return Bars(title, bars, marks, about, _classes(held))


def byte_bars(title: str, held: Sequence[Held]) -> Bars:
    """Draw the same on one scale of bytes, which ends with the longest peak."""
    longest = max((each.place.peak_nbytes for each in held), default=0) or 1
    bars = []
    for each in held:
        capacity = each.place.capacity_nbytes / longest
        pieces = _pieces(each.place, each.place.peak_nbytes / longest)
        bars.append(
            Bar(
                each.name, pieces, format_bytes(each.place.peak_nbytes), track=min(1.0, capacity),
                mark=capacity < 1, state="bad" if each.short else "",
            )
        )  # fmt: skip
    return Bars(title, tuple(bars), byte_ticks(longest, _FEW_TICKS), _OF_BYTES)


def lanes(step: StepEstimate) -> Bars:
    """Draw the work of each link over time, in the order of the links."""
    names = dict.fromkeys([*(link.name for link in step.links), *(s.link for s in step.spans)])
    length = step_length(step)
    end = step.seconds / length
    bars = []
    for name in names:
        pieces = tuple(
            Piece(span_meaning(s.link, s.label), s.label, duration(s.stop_s - s.start_s),
                  share((s.stop_s - s.start_s) / length), s.start_s / length, s.stop_s / length)
            for s in step.spans if s.link == name
        )  # fmt: skip
        if pieces:
            bars.append(Bar(name, pieces, track=end, mark=end < 1))
    keys = dict.fromkeys(
        (piece.meaning, piece.label if bar.name == COMPUTE else piece.meaning)
        for bar in bars
        for piece in bar.pieces
    )
    about = _LATER if end < 1 else ""
    return Bars("", tuple(bars), ticks(length, _FEW_TICKS), about, tuple(keys))


def span_meaning(link: str, label: str) -> str:
    """Return the meaning of a span's colour: each link has one, the model's work two."""
    if link == COMPUTE:
        return "backward" if label == "backward" else "compute"
    return "update" if link == OPTIMIZER else link


def step_length(step: StepEstimate) -> float:
    """Return the seconds that the time axis covers."""
    return max([step.seconds, *(span.stop_s for span in step.spans)]) or 1.0


def _of_capacity(held: Held, length: float, value: str) -> Bar:
    place = held.place
    # the bytes of a missing place fill the drawing
    peak = min(filled(place) / length, 1e6) if place.capacity_nbytes else 1.0
    track = 1 / length if place.capacity_nbytes else 0.0
    return Bar(
        held.name, _pieces(place, peak), value, track=track, mark=0 < track < 1, broken=peak > 1,
        state="bad" if held.short else "",
    )  # fmt: skip


def _capacity_ticks(length: float) -> tuple[Tick, ...]:
    marks = [(0.0, "0"), (0.5, "50 %"), (1.0, "capacity"), (2.0, "2 x"), (3.0, "3 x")]
    return tuple(
        Tick(text, at / length)
        for at, text in marks
        if at <= length and not (at == 0.5 and length > 2)
    )


def _classes(held: Iterable[Held]) -> tuple[tuple[str, str], ...]:
    there = {name for each in held for name, nbytes in each.place.by_class.items() if nbytes}
    return tuple((str(name), str(name)) for name in MemoryClass if name in there)


def _pieces(place: PlaceEstimate, length: float) -> tuple[Piece, ...]:
    """Return pieces for the classes, one after the other, `length` long together, up to the end of
    the drawing."""
    present = {name: n for name in MemoryClass if (n := place.by_class.get(name, 0)) > 0}
    edges = accumulate(_widths(list(present.values()), length), initial=0.0)
    return tuple(
        Piece(str(name), str(name), format_bytes(nbytes), share(nbytes / place.peak_nbytes),
              start, min(1.0, stop))
        for (name, nbytes), (start, stop) in zip(present.items(), pairwise(edges), strict=True)
        if start < 1
    )  # fmt: skip


def _widths(sizes: Sequence[int], length: float) -> list[float]:
    """Return the shares of `length`, each at least `LEAST_WIDTH`, taken from the wider ones."""
    length = max(length, LEAST_WIDTH * len(sizes))
    small: set[int] = set()
    while True:
        rest = sum(size for index, size in enumerate(sizes) if index not in small)
        room = length - LEAST_WIDTH * len(small)
        widths = [
            LEAST_WIDTH if i in small or not rest else room * n / rest for i, n in enumerate(sizes)
        ]
        found = {index for index, width in enumerate(widths) if width < LEAST_WIDTH}
        if not found - small:
            return widths
        small |= found
