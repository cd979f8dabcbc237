"""A sheet as one PNG, with the facts of the HTML page."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from offload.pages.colours import DARK, LIGHT, Theme, ink_on
from offload.tiers.errors import ConfigError
from offload.tools.memest.show.sheet import (
    Bar,
    Bars,
    Block,
    Cell,
    Figures,
    Heading,
    Lines,
    Piece,
    Sheet,
    Table,
    as_cell,
    label_room,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties

# All lengths in inches, from the upper left corner; text sizes in points.
_WIDTH, _MARGIN, _DPI = 9.6, 0.3, 150
_INNER = _WIDTH - 2 * _MARGIN
_SMALL, _USUAL, _LARGE = 8.5, 9.5, 14.0
_LINE = 1.45 / 72  # of a point of text: its line's height
_BAR, _BAR_LINE, _SWATCH, _GAP, _COLUMN = 0.22, 0.28, 0.1, 0.16, 0.22


def to_png(sheet: Sheet, *, dark: bool = False) -> bytes:
    """The file's bytes. ConfigError where matplotlib is not installed."""
    figure = draw(sheet, DARK if dark else LIGHT)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters that the font has not
        figure.savefig(file, format="png", facecolor=figure.get_facecolor())
    return file.getvalue()


def draw(sheet: Sheet, theme: Theme) -> Figure:
    """The picture. ConfigError where matplotlib is not installed."""
    page = _Page(theme)
    page.text(sheet.title, _LARGE, bold=True)
    for text in sheet.about:
        page.text(text, _USUAL, theme.quiet)
    page.gap()
    colour = getattr(theme, sheet.state) if sheet.state else theme.ink
    page.text(sheet.verdict, 11.0, colour, bold=True)
    for block in sheet.blocks:
        page.gap()
        _block(page, block)
    return page.figure()


class _Page:
    """What is to be drawn, put down from the top; the figure is as high as that takes."""

    def __init__(self, theme: Theme) -> None:
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError:
            raise ConfigError(
                "--format png needs matplotlib; pip install 'offload[report]', or use --format html"
            ) from None
        self.theme = theme
        self.top = _MARGIN
        self._drawn: list[Callable[[Axes], Any]] = []

    def figure(self) -> Figure:
        from matplotlib.figure import Figure

        height = self.top + _MARGIN
        figure = Figure(figsize=(_WIDTH, height), facecolor=self.theme.page, dpi=_DPI)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, _WIDTH), ylim=(height, 0))
        axes.axis("off")
        for put in self._drawn:
            put(axes)
        return figure

    def gap(self) -> None:
        self.top += _GAP

    def text(
        self, text: str, size: float = _USUAL, colour: str = "", *, bold: bool = False,
        left: float = _MARGIN, width: float = _INNER,
    ) -> None:  # fmt: skip
        """Lines, broken where `width` ends, below what there is."""
        for line in wrapped(text, size, width, bold=bold):
            self.line(line, left, size, colour, bold=bold)
            self.top += size * _LINE

    def line(
        self, text: str, x: float, size: float, colour: str = "", *, bold: bool = False,
        align: str = "left", middle: float | None = None,
    ) -> None:  # fmt: skip
        """One line at the top, or about `middle`."""
        y = self.top + size * _LINE / 2 if middle is None else middle
        weight = "bold" if bold else "normal"
        ink = colour or self.theme.ink
        self._drawn.append(
            lambda axes: axes.text(
                x, y, text, fontsize=size, color=ink, weight=weight, ha=align,
                va="center_baseline", parse_math=False,
            )
        )  # fmt: skip

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        from matplotlib.patches import Rectangle

        self._drawn.append(
            lambda axes: axes.add_patch(Rectangle((x, y), width, height, color=colour, linewidth=0))
        )

    def shape(self, corners: Sequence[tuple[float, float]], colour: str) -> None:
        from matplotlib.patches import Polygon

        self._drawn.append(lambda axes: axes.add_patch(Polygon(corners, color=colour, linewidth=0)))

    def swatch(self, x: float, middle: float, meaning: str) -> None:
        self.box(x, middle - _SWATCH / 2, _SWATCH, _SWATCH, self.theme.of[meaning])


# ---------------------------------------------------------------- text
@cache
def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Inches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        width, _, _ = _renderer().get_text_width_height_descent(text, _font(size, bold), False)
    return float(width) / _DPI


@cache
def _renderer() -> RendererAgg:
    from matplotlib.backends.backend_agg import RendererAgg

    return RendererAgg(1, 1, _DPI)


@cache
def _font(size: float, bold: bool) -> FontProperties:
    from matplotlib.font_manager import FontProperties

    return FontProperties(size=size, weight="bold" if bold else "normal")


def wrapped(text: str, size: float, width: float, *, bold: bool = False) -> list[str]:
    """Lines that are no wider; words that are are broken."""
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}", size, bold=bold) <= width:
            lines[-1] += f" {word}"
            continue
        while text_width(word, size, bold=bold) > width and len(word) > 1:
            fits = next(
                n for n in range(len(word) - 1, 0, -1)
                if n == 1 or text_width(word[:n], size, bold=bold) <= width
            )  # fmt: skip
            lines.append(word[:fits])
            word = word[fits:]
        lines.append(word)
    return lines


# ---------------------------------------------------------------- blocks
def _block(page: _Page, block: Block) -> None:
    match block:
        case Heading(text):
            page.gap()
            page.text(text, 11.0, bold=True)
            page.top -= _GAP / 2
        case Figures():
            _figures(page, block)
        case Lines():
            _title(page, block.title)
            for text in block.texts:
                page.line("·", _MARGIN, _USUAL)
                page.text(text, left=_MARGIN + 0.12, width=_INNER - 0.12)
        case Table():
            _title(page, block.title)
            _table(page, block)
            if block.about:
                page.top += _GAP / 3
                page.text(block.about, _SMALL, page.theme.quiet)
        case Bars():
            _bars(page, block)


def _title(page: _Page, title: str) -> None:
    if title:
        page.text(title, _USUAL, bold=True)


def _figures(page: _Page, block: Figures) -> None:
    """Side by side."""
    width = _INNER / max(4, len(block.figures))
    top = lowest = page.top
    for index, each in enumerate(block.figures):
        page.top, left, room = top, _MARGIN + index * width, width - 0.1
        page.text(each.name, _SMALL, page.theme.quiet, left=left, width=room)
        page.text(each.value, 11.0, bold=True, left=left, width=room)
        page.text(each.aside, _SMALL, page.theme.quiet, left=left, width=room)
        lowest = max(lowest, page.top)
    page.top = lowest


def _table(page: _Page, block: Table) -> None:
    rows = [[as_cell(cell) for cell in row] for row in block.rows]
    widths = _column_widths(block, rows)
    if any(block.heads):
        heads = [Cell(head) for head in block.heads]
        _row(page, heads, widths, block.left, page.theme.quiet)
    for row in rows:
        page.box(_MARGIN, page.top, sum(widths) - _COLUMN, 0.007, page.theme.line)
        _row(page, row, widths, block.left)


def _cell_width(cell: Cell) -> float:
    texts = (*cell.code, cell.text)
    widest = max(text_width(text, _USUAL, bold=cell.strong) for text in texts)
    return widest + (0.16 if cell.meaning else 0) + _COLUMN


def _column_widths(block: Table, rows: Sequence[Sequence[Cell]]) -> list[float]:
    """As wide as the widest cell; heads are broken where need be, and then columns of words."""
    every = [[Cell(head) for head in block.heads], *rows]
    widths = [max(_cell_width(row[i]) for row in every) for i in range(len(block.heads))]
    for some in (every[1:] or every, None):
        beyond = sum(widths) - _INNER
        if beyond <= 0:
            break
        if some is not None:
            widths = [max(_cell_width(row[i]) for row in some) for i in range(len(widths))]
        else:
            widest = max(block.left or range(len(widths)), key=lambda i: widths[i])
            widths[widest] = max(1.0, widths[widest] - beyond)
    return widths


def _row(
    page: _Page, cells: Sequence[Cell], widths: Sequence[float], left: frozenset[int],
    colour: str = "",
) -> None:  # fmt: skip
    page.top += 0.03
    top, lowest, x = page.top, page.top, _MARGIN
    for index, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        page.top, room = top, width - _COLUMN
        if cell.meaning:
            page.swatch(x, top + _USUAL * _LINE / 2, cell.meaning)
        inset = 0.16 if cell.meaning else 0.0
        ink = getattr(page.theme, cell.state) if cell.state else colour
        for text in (*cell.code, cell.text):
            for line in wrapped(text, _USUAL, room - inset + 0.01, bold=cell.strong):
                at, align = (x + inset, "left") if index in left else (x + room, "right")
                page.line(line, at, _USUAL, ink, bold=cell.strong, align=align)
                page.top += _USUAL * _LINE
        lowest, x = max(lowest, page.top), x + width
    page.top = lowest + 0.03


def _bars(page: _Page, block: Bars) -> None:
    _title(page, block.title)
    if block.about:
        page.text(block.about, _SMALL, page.theme.quiet)
    names = max(text_width(bar.name, _USUAL) for bar in block.bars) + 0.12
    values = max(text_width(bar.value, _USUAL) for bar in block.bars)
    left, width = _MARGIN + names, _INNER - names - (values + 0.12 if values else 0)
    page.top += 0.04
    for bar in block.bars:
        _bar(page, bar, left, width)
    for tick in block.ticks:
        align = "left" if tick.at < 0.03 else "right" if tick.at > 0.97 else "center"
        at = left + tick.at * width
        page.box(at, page.top, 0.007, 0.04, page.theme.quiet)
        middle = page.top + 0.12
        page.line(tick.text, at, _SMALL, page.theme.quiet, align=align, middle=middle)
    page.top += 0.24
    _keys(page, block.keys)


def _bar(page: _Page, bar: Bar, left: float, width: float) -> None:
    theme, top = page.theme, page.top
    middle = top + _BAR / 2
    page.line(bar.name, _MARGIN, _USUAL, middle=middle)
    colour = getattr(theme, bar.state) if bar.state else ""
    page.line(bar.value, _MARGIN + _INNER, _USUAL, colour, align="right", middle=middle)
    page.box(left, top, bar.track * width, _BAR, theme.track)
    for piece in bar.pieces:
        _piece(page, piece, left, width)
        start, stop = label_room(bar, piece)
        if (stop - start) * width >= text_width(piece.label, _SMALL) + 0.1:
            ink, at = ink_on(theme.of[piece.meaning]), left + (start + stop) / 2 * width
            page.line(piece.label, at, _SMALL, ink, align="center", middle=middle)
    if bar.mark:
        page.box(left + bar.track * width - 0.01, top - 0.02, 0.02, _BAR + 0.04, theme.ink)
    if bar.broken:
        end, wide = left + width - 0.14, 0.06
        corners = [(end, top), (end + wide, top), (end + wide - 0.05, top + _BAR),
                   (end - 0.05, top + _BAR)]  # fmt: skip
        page.shape(corners, theme.page)
    page.top += _BAR_LINE


def _piece(page: _Page, piece: Piece, left: float, width: float) -> None:
    long = (piece.stop - piece.start) * width
    gap = 0.008 if long > 0.03 else 0.0
    colour = page.theme.of[piece.meaning]
    page.box(left + piece.start * width, page.top, max(long - gap, 0.008), _BAR, colour)


def _keys(page: _Page, keys: Sequence[tuple[str, str]]) -> None:
    """In lines, as many as there is room for in each."""
    x, height = _MARGIN, _SMALL * _LINE + 0.02
    for meaning, text in keys:
        needed = 0.15 + text_width(text, _SMALL) + 0.2
        if x > _MARGIN and x + needed > _MARGIN + _INNER:
            x, page.top = _MARGIN, page.top + height
        page.swatch(x, page.top + height / 2, meaning)
        page.line(text, x + 0.15, _SMALL, middle=page.top + height / 2)
        x += needed
    page.top += height if keys else 0
