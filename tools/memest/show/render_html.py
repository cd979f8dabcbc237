"""A sheet as one HTML file."""

from __future__ import annotations

from html import escape

from offload.pages.html_page import key, lines, page, swatch, table
from offload.pages.svg import drawing, mark, percent, stretch
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

_HEIGHT = 26  # of a bar, in pixels, as `.stack` has it


def to_html(sheet: Sheet) -> str:
    """Return the page. All text is escaped."""
    about = "".join(f'<p class="quiet">{escape(text)}</p>' for text in sheet.about)
    head = (
        f"<h1>{escape(sheet.title)}</h1>{about}"
        f'<p class="verdict {sheet.state}">{escape(sheet.verdict)}</p>'
    )
    return page(sheet.name, head + "".join(map(_block, sheet.blocks)), by="memest")


def _block(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{escape(text)}</h2>"
        case Figures():
            return _figures(block)
        case Lines():
            return _card(block.title, lines(block.texts))
        case Table():
            return _card(block.title, _table(block) + _after(block.about))
        case Bars():
            return _card(block.title, _bars(block) + key(block.keys))


def _card(title: str, inside: str) -> str:
    head = f"<h3>{escape(title)}</h3>" if title else ""
    return f'<div class="card">{head}{inside}</div>'


def _after(text: str) -> str:
    return f'<p class="quiet after">{escape(text)}</p>' if text else ""


def _figures(block: Figures) -> str:
    cards = "".join(
        f'<div class="card"><span class="quiet">{escape(each.name)}</span>'
        f'<b>{escape(each.value)}</b><span class="quiet">{escape(each.aside)}</span></div>'
        for each in block.figures
    )
    return f'<div class="figures">{cards}</div>'


def _table(block: Table) -> str:
    rows = [[_cell(as_cell(cell)) for cell in row] for row in block.rows]
    return table(block.heads, rows, left=block.left, stacked=block.stacked)


def _cell(cell: Cell) -> str:
    code = "".join(f"<code>{escape(line)}</code><br>" for line in cell.code)
    text = escape(cell.text)
    if cell.strong:
        text = f"<b>{text}</b>"
    if cell.state:
        text = f'<span class="{cell.state}">{text}</span>'
    if cell.meaning:
        return f'<span class="named">{swatch(cell.meaning)}{text}</span>'
    return f"{code}{text}"


def _bars(block: Bars) -> str:
    valued = any(bar.value for bar in block.bars)
    rows = "".join(_row(bar, valued=valued) for bar in block.bars)
    axis = drawing("axis", "scale", map(mark, block.ticks))
    about = f'<p class="quiet">{escape(block.about)}</p>' if block.about else ""
    rows += f'<span class="none"></span>{axis}'
    return f'{about}<div class="rows{" valued" if valued else ""}">{rows}</div>'


def _row(bar: Bar, *, valued: bool) -> str:
    said = "; ".join(f"{piece.label} {piece.value}" for piece in bar.pieces)
    label = f"{bar.name} {bar.value}: {said or 'nothing'}"
    value = f'<span class="value {bar.state}">{escape(bar.value)}</span>' if valued else ""
    return f"<span>{escape(bar.name)}</span>{drawing('stack', label, _parts(bar))}{value}"


def _parts(bar: Bar) -> list[str]:
    track = f'<rect width="{percent(bar.track)}" height="100%" rx="2" fill="var(--track)"/>'
    parts = [track, *(_piece(each, bar) for each in bar.pieces)]
    if bar.mark:
        parts.append(f'<rect x="{percent(bar.track)}" width="2" height="100%" fill="var(--ink)"/>')
    if bar.broken:
        parts.append(
            f'<svg x="100%" overflow="visible"><path d="M-20 0l-7 {_HEIGHT}h8l7-{_HEIGHT}z" '
            'fill="var(--card)"/></svg>'
        )
    return parts


def _piece(piece: Piece, bar: Bar) -> str:
    tip, room = f"{piece.label}: {piece.value} ({piece.share})", label_room(bar, piece)
    return stretch(piece.start, piece.stop, _HEIGHT, piece.meaning, piece.label, tip, room)
