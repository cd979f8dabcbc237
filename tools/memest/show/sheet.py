"""The blocks of a page before it is drawn, from which HTML is rendered.

    Bars    RAM      ├ parameters ┤├ optimizer ┤        │ capacity      12.0 GiB of 24.0 GiB
            compute  ├ forward ┤├──── backward ────┤
                     0              50 %            capacity

Positions are fractions of a drawing's width.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from offload.pages.ticks import Tick


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table. `code` comes before the text, each on a line of its own; `meaning` is that
    of the colour before it (`pages.colours`); `state` is good, bad or empty."""

    text: str
    code: tuple[str, ...] = ()
    meaning: str = ""
    state: str = ""
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """One coloured stretch of a bar."""

    meaning: str  # of its colour
    label: str
    value: str  # bytes or seconds, in words
    share: str  # of the bar or step, in words
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar. `track`: the end of what could be filled. `mark`: a line there, if the filled part may
    go beyond. `broken`: the bar continues beyond the drawing."""

    name: str
    pieces: tuple[Piece, ...]
    value: str = ""
    track: float = 1.0
    mark: bool = False
    broken: bool = False
    state: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A key figure: a name, a value, and a remark beside it."""

    name: str
    value: str
    aside: str = ""


@dataclass(frozen=True, slots=True)
class Heading:
    """The heading of the blocks that follow."""

    text: str


@dataclass(frozen=True, slots=True)
class Figures:
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Lines:
    """A list of sentences; an empty one is not shown."""

    texts: tuple[str, ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table; columns contain numbers except those in `left`. `stacked`: it has more columns than
    fit on a narrow page."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    left: frozenset[int] = frozenset({0})
    title: str = ""
    about: str = ""  # below it
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars on one scale, with `ticks`; `about` says what they show."""

    title: str
    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]
    about: str = ""
    keys: tuple[tuple[str, str], ...] = ()  # meanings of colours, and how they are called here


Block = Heading | Figures | Lines | Table | Bars


@dataclass(frozen=True, slots=True)
class Sheet:
    """A page. `state` is that of the verdict: good, bad or empty."""

    name: str  # of the file's window
    title: str
    about: tuple[str, ...]
    verdict: str
    state: str
    blocks: tuple[Block, ...]


_BREAK = 0.1  # of a drawing, at its end: where a bar that goes on is broken off


def label_room(bar: Bar, piece: Piece) -> tuple[float, float]:
    """Return the start and end of the room for a piece's label: the longest of its parts between
    the bar's line and its break, so that nothing crosses letters."""
    cuts = [bar.track] * bar.mark + [1 - _BREAK] * bar.broken
    edges = [piece.start, *(cut for cut in cuts if piece.start < cut < piece.stop), piece.stop]
    parts = list(pairwise(edges))
    if bar.broken and piece.stop >= 1 and len(parts) > 1:
        parts.pop()
    return max(parts, key=lambda part: part[1] - part[0])


def as_cell(cell: str | Cell) -> Cell:
    return Cell(cell) if isinstance(cell, str) else cell
