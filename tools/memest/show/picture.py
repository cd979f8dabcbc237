"""What the pictures of an estimate show, before it is known how they are drawn.

    place    ├ parameters ┤├ gradients ┤├── optimizer ──┤├ ... ┤     shares of the peak
    gauge    ├────────── peak ─────────┤        │ capacity           shares of the larger of both
    lanes    compute  ├ forward ┤├──── backward ────┤                shares of the step

All positions are fractions of the picture's width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from offload.planning.plan.estimate import MemoryClass, MemoryEstimate, PlaceEstimate, StepEstimate
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.show.colours import SPANS
from offload.tools.memest.show.wording import duration, share

PLACE_TITLES = {
    Tier.DEVICE: "GPU memory",
    Tier.HOST: "RAM",
    Tier.NVME: "Disk (nvme)",
}
_UNITS = ((365.25 * 86400, "years"), (86400, "days"), (3600, "h"), (60, "min"), (1, "s"),
          (1e-3, "ms"), (1e-6, "µs"))  # fmt: skip
LEAST_WIDTH = 0.004  # of a piece that is there at all: it can be seen, and pointed at


@dataclass(frozen=True, slots=True)
class Piece:
    """One coloured stretch of a bar or lane."""

    label: str
    value: str  # bytes or seconds, in words
    share: str  # of the bar or step, in words
    start: float
    stop: float
    colour: int  # of `colours.Theme.colours`


@dataclass(frozen=True, slots=True)
class Bar:
    """The peak of one place, by class."""

    tier: Tier
    title: str
    peak_nbytes: int
    capacity_nbytes: int
    pieces: tuple[Piece, ...]

    @property
    def filled(self) -> float:
        """Share of the capacity; infinite where there is none."""
        if not self.capacity_nbytes:
            return math.inf if self.peak_nbytes else 0.0
        return self.peak_nbytes / self.capacity_nbytes

    @property
    def fits(self) -> bool:
        return self.peak_nbytes <= self.capacity_nbytes

    @property
    def gauge_peak(self) -> float:
        """Where the peak ends on a line that holds both it and the capacity."""
        longest = max(self.peak_nbytes, self.capacity_nbytes)
        return self.peak_nbytes / longest if longest else 0.0

    @property
    def gauge_capacity(self) -> float:
        """Where the capacity ends on the same line."""
        longest = max(self.peak_nbytes, self.capacity_nbytes)
        return self.capacity_nbytes / longest if longest else 1.0


@dataclass(frozen=True, slots=True)
class Lane:
    """What one link does during a step."""

    link: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of the time axis."""

    text: str
    at: float


def bars(memory: MemoryEstimate) -> tuple[Bar, ...]:
    """One bar per place, fastest first."""
    return tuple(_bar(tier, memory.places[tier]) for tier in Tier if tier in memory.places)


def lanes(step: StepEstimate) -> tuple[Lane, ...]:
    """One lane per link that has spans, in the order of the links."""
    names = dict.fromkeys([*(link.name for link in step.links), *(s.link for s in step.spans)])
    length, colours = step_length(step), span_colours(step)
    found = []
    for name in names:
        pieces = tuple(
            Piece(s.label, duration(s.stop_s - s.start_s), share((s.stop_s - s.start_s) / length),
                  s.start_s / length, s.stop_s / length, colours[s.label])
            for s in step.spans if s.link == name
        )  # fmt: skip
        if pieces:
            found.append(Lane(name, pieces))
    return tuple(found)


def span_colours(step: StepEstimate) -> dict[str, int]:
    """Of what spans do, each once, in the order in which it is first done."""
    labels = dict.fromkeys(span.label for span in sorted(step.spans, key=lambda s: s.start_s))
    return {label: SPANS[index % len(SPANS)] for index, label in enumerate(labels)}


def step_length(step: StepEstimate) -> float:
    """Seconds that the time axis covers."""
    return max([step.seconds, *(span.stop_s for span in step.spans)]) or 1.0


def ticks(length_s: float, wanted: int = 5) -> tuple[Tick, ...]:
    """Round times from 0 on, about `wanted` of them, in one unit."""
    unit, name = next(each for each in _UNITS if length_s >= each[0] * 2 or each is _UNITS[-1])
    width = _rounded(length_s / unit / wanted, by_sixty=name in ("min", "s") and length_s > 2)
    count = int(length_s / unit / width * 1.000001)
    return tuple(
        Tick(f"{i * width:,.10g} {name}" if i else "0", min(1.0, i * width * unit / length_s))
        for i in range(count + 1)
    )


def _rounded(value: float, *, by_sixty: bool) -> float:
    """About that, as 1, 2, 5, 10, 20 ...; of minutes and seconds also 15 and 30."""
    if by_sixty and 10 < value <= 30:
        return 15.0 if value <= 15 else 30.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value * 0.75)


def _bar(tier: Tier, place: PlaceEstimate) -> Bar:
    held = [(index, name, place.by_class.get(name, 0)) for index, name in enumerate(MemoryClass)]
    present = [each for each in held if each[2] > 0]
    edges = [0.0, *accumulate(_widths([nbytes for *_, nbytes in present]))]
    pieces = tuple(
        Piece(
            str(name), format_bytes(nbytes), share(nbytes / place.peak_nbytes), start, stop, index
        )
        for (index, name, nbytes), (start, stop) in zip(present, pairwise(edges), strict=True)
    )
    return Bar(tier, PLACE_TITLES[tier], place.peak_nbytes, place.capacity_nbytes, pieces)


def _widths(sizes: Sequence[int]) -> list[float]:
    """Shares of the sum, each at least `LEAST_WIDTH`, taken from those that are wider."""
    small: set[int] = set()
    while True:
        rest = sum(size for index, size in enumerate(sizes) if index not in small)
        room = 1.0 - LEAST_WIDTH * len(small)
        widths = [LEAST_WIDTH if i in small else room * n / rest for i, n in enumerate(sizes)]
        found = {index for index, width in enumerate(widths) if width < LEAST_WIDTH}
        if not found:
            return widths
        small |= found
