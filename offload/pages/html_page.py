"""The frame of an HTML page: one file, no scripts, nothing fetched, light or dark."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

from offload.pages.colours import DARK, LIGHT, Theme, ink_on

_RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
 font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
 font-variant-numeric:tabular-nums}
main{max-width:980px;margin:0 auto;padding:28px 20px 40px}
h1{font-size:22px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:16px;margin:30px 0 10px}
p{margin:0 0 6px}
.quiet{color:var(--quiet)}
.verdict{display:inline-block;margin:10px 0 2px;padding:3px 12px;border-radius:14px;
 font-weight:600;border:1.5px solid currentColor}
.good{color:var(--good)}.bad{color:var(--bad)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:10px;
 margin-top:18px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px 16px}
.figures .card{padding:10px 14px}
.figures b{display:block;font-size:20px;line-height:1.3}
.place+.place{margin-top:12px}
.head{display:flex;justify-content:space-between;gap:12px;flex-wrap:wrap;margin-bottom:8px}
svg{display:block;width:100%}
.gauge{height:14px;margin-bottom:8px}
.stack{height:34px}
.lane{height:26px}
.axis{height:22px}
svg text{font-size:12px;font-family:inherit}
.keys{display:grid;grid-template-columns:repeat(auto-fill,minmax(250px,1fr));gap:3px 28px;
 margin:12px 0 0;padding:0;list-style:none;font-size:14px}
.keys li{display:flex;align-items:center;gap:8px;white-space:nowrap}
.keys .value{margin-left:auto}
.keys .part{min-width:52px;text-align:right;color:var(--quiet)}
.swatch{width:11px;height:11px;border-radius:3px;flex:none}
.lanes{display:grid;grid-template-columns:max-content 1fr;gap:5px 12px;align-items:center}
.name{font-size:14px;white-space:nowrap}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--line);
 vertical-align:top}
tr:last-child td{border-bottom:0}
th{font-weight:600;color:var(--quiet)}
td.number,th.number{text-align:right;white-space:nowrap}
code{font:13px/1.4 ui-monospace,"DejaVu Sans Mono",monospace;white-space:nowrap}
ul.lines{margin:0;padding-left:20px}
ul.lines li{overflow-wrap:anywhere;margin-bottom:3px}
.after{margin:10px 0 0}
.wide{max-width:1240px}.wide td,.wide th{padding-right:9px;font-size:13px}
.bars td{border-bottom:0;padding:2px 14px 2px 0}.bars svg{height:16px}
.bars td:last-child{width:100%}
footer{margin-top:26px;font-size:13px;color:var(--quiet)}
"""


def page(title: str, body: str, *, by: str, wide: bool = False) -> str:
    """The file. `body` is HTML; `title` is escaped here, as by all that follow. `by` is the
    program that writes it."""
    width = "wide" if wide else "usual"
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_style_sheet()}</style></head>"
        f'<body><main class="{width}">{body}'
        "<footer>Bytes in binary units: 1 GiB = 1,073,741,824 bytes. Written by "
        f"{escape(by)}.</footer>"
        "</main></body></html>\n"
    )


def lines(title: str, texts: Iterable[str]) -> str:
    """A heading and a list; nothing where there are no texts."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    if not items:
        return ""
    return f'<h2>{escape(title)}</h2><div class="card"><ul class="lines">{items}</ul></div>'


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = (0,),
    kind: str = "plain",
) -> str:  # fmt: skip
    """Cells are HTML; columns are of numbers but for those at `left`."""

    def row(tag: str, cells: Sequence[str]) -> str:
        of = ("" if index in left else ' class="number"' for index in range(len(cells)))
        return "".join(f"<{tag}{k}>{c}</{tag}>" for k, c in zip(of, cells, strict=True))

    head = f"<tr>{row('th', heads)}</tr>" if heads else ""
    body = "".join(f"<tr>{row('td', cells)}</tr>" for cells in rows)
    return f'<table class="{kind}">{head}{body}</table>'


def key(pieces: Iterable[tuple[int, str]]) -> str:
    """Colours and what they stand for, which is HTML."""
    items = "".join(
        f'<li><span class="swatch c-{colour}"></span>{text}</li>' for colour, text in pieces
    )
    return f'<ul class="keys">{items}</ul>'


def _style_sheet() -> str:
    """All rules; colours are variables that follow what the reader's system prefers."""
    dark = f"@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"
    scheme = ":root{color-scheme:light dark;" + _variables(LIGHT) + "}"
    colours = "".join(
        f".c-{n}{{fill:var(--c{n});background:var(--c{n})}}.i-{n}{{fill:var(--on{n})}}"
        for n in range(len(LIGHT.colours))
    )
    return f"{scheme}{dark}{_RULES}{colours}"


def _variables(theme: Theme) -> str:
    names = ("page", "card", "ink", "quiet", "line", "track", "good", "bad")
    named = {name: getattr(theme, name) for name in names}
    for index, colour in enumerate(theme.colours):
        named |= {f"c{index}": colour, f"on{index}": ink_on(colour)}
    return "".join(f"--{name}:{value};" for name, value in named.items())
