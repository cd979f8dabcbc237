"""The frame of an HTML page: one file, no scripts, nothing fetched, light or dark."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

from offload.display.plain_text import without_controls
from offload.pages.colours import DARK, LIGHT, Theme, ink_on
from offload.pages.svg import colour_class

_RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
 font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
 font-variant-numeric:tabular-nums}
main{max-width:980px;margin:0 auto;padding:28px 20px 40px}
h1{font-size:22px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:16px;margin:30px 0 10px}
h3{font-size:14px;margin:0 0 8px}
p{margin:0 0 6px;overflow-wrap:anywhere}
.quiet{color:var(--quiet)}
.verdict{display:inline-block;margin:10px 0 2px;padding:3px 12px;border-radius:14px;
 font-weight:600;border:1.5px solid currentColor}
.good{color:var(--good)}.bad{color:var(--bad)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:10px;
 margin-top:18px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px 16px}
.card+.card{margin-top:12px}
.figures .card{padding:10px 14px;margin:0;overflow-wrap:anywhere}
.figures b{display:block;font-size:20px;line-height:1.3}
svg{display:block;width:100%}
.stack{height:26px}
.lane{height:26px}
.axis{height:22px}
svg text{font-size:12px;font-family:inherit}
.keys{display:flex;flex-wrap:wrap;gap:3px 20px;margin:12px 0 0;padding:0;list-style:none;
 font-size:14px}
.keys li,.named{white-space:nowrap}
.swatch{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px}
.rows{display:grid;grid-template-columns:max-content 1fr;grid-auto-flow:row dense;gap:6px 12px;
 align-items:center;font-size:14px}
.rows.valued{grid-template-columns:max-content 1fr max-content}
.rows span{overflow-wrap:anywhere}
.rows .value{text-align:right}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--line);
 vertical-align:top;overflow-wrap:break-word}
th:last-child,td:last-child{padding-right:0}
tr:last-child td{border-bottom:0}
th{font-weight:600;color:var(--quiet);vertical-align:bottom}
.number{text-align:right}td.number{white-space:nowrap}
code{font:13px/1.4 ui-monospace,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
ul.lines{margin:0;padding-left:20px}
ul.lines li{overflow-wrap:anywhere;margin-bottom:3px}
.after{margin:10px 0 0}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:12px;
 margin-top:12px}
.charts .card{margin:0}
.chart{display:grid;grid-template-columns:66px 1fr;gap:8px}
.chart>svg{overflow:visible}
.chart path{fill:none;stroke:var(--ink);stroke-width:1.7px;stroke-linecap:round;
 stroke-linejoin:round;vector-effect:non-scaling-stroke}
.chart path.wide{stroke-width:4.5px;opacity:.4}
.chart path.dashed{stroke-width:1.3px;stroke-dasharray:5 4}
.chart path.layer{stroke:none}
.chart path.band{stroke:none;fill:var(--ink);opacity:.18}
.chart .grid{stroke:var(--line)}
.chart .limit{stroke:var(--quiet);stroke-dasharray:6 4}
.chart .dot{fill:var(--card);stroke:var(--ink);stroke-width:1.5px}
.chart .tick{fill:var(--quiet);font-size:11px}
pre{margin:0;font:12.5px/1.5 ui-monospace,"DejaVu Sans Mono",monospace;white-space:pre-wrap;
 overflow-wrap:anywhere;columns:260px;column-gap:28px}
footer{margin-top:26px;font-size:13px;color:var(--quiet)}
@media (max-width:760px){
 .rows{grid-template-columns:1fr}.rows.valued{grid-template-columns:1fr max-content}
 .rows svg{grid-column:1/-1}.rows .none{display:none}
 .stacked,.stacked tbody,.stacked tr{display:block}.stacked thead{display:none}
 .stacked tr{padding:8px 0;border-bottom:1px solid var(--line)}
 .stacked tr:last-child{border-bottom:0}
 .stacked td{display:flex;justify-content:space-between;gap:14px;padding:2px 0;border:0}
 .stacked td::before{content:attr(data-head);color:var(--quiet)}
 .stacked td:first-child{font-weight:600}
}
@media (max-width:440px){
 main{padding:20px 14px 30px}.card{padding:12px 13px}table{font-size:13px}
 th,td{padding-right:8px}
}
@media (max-width:400px){.on{display:none}td.number{white-space:normal}}
@media print{
 *{print-color-adjust:exact;-webkit-print-color-adjust:exact}
 body{background:none}main{max-width:none;padding:0}.card,tr{break-inside:avoid}h2,h3{break-after:avoid}
}
"""


def page(title: str, body: str, *, by: str) -> str:
    """Return the file. `body` is HTML; `title` is escaped here, as in all functions below; control
    characters are shown as Python escapes. `by` is the program that writes it."""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(without_controls(title))}</title><style>{_style_sheet()}</style></head>"
        f"<body><main>{without_controls(body)}"
        "<footer>Bytes in binary units: 1 GiB = 1,073,741,824 bytes. Written by "
        f"{escape(by)}.</footer>"
        "</main></body></html>\n"
    )


def lines(texts: Iterable[str]) -> str:
    """Return a list of `texts`; empty if there are none."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="lines">{items}</ul>' if items else ""


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = (0,),
    stacked: bool = False,
) -> str:  # fmt: skip
    """Return a table of text heads and HTML cells; columns except `left` are numbers. With
    `stacked`, narrow pages show each row as lines, with a head before each cell."""
    kinds = ["" if index in left else ' class="number"' for index in range(len(heads))]

    def row(cells: Sequence[str]) -> str:
        of = zip(kinds, heads, cells, strict=True)
        return "".join(f'<td{k} data-head="{escape(h)}">{c}</td>' for k, h, c in of)

    head = "".join(
        f'<th scope="col"{k}>{escape(h)}</th>' for k, h in zip(kinds, heads, strict=True)
    )
    head = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    body = "".join(f"<tr>{row(cells)}</tr>" for cells in rows)
    kind = ' class="stacked"' if stacked else ""
    return f"<table{kind}>{head}<tbody>{body}</tbody></table>"


def swatch(meaning: str) -> str:
    """Return a spot of the colour of a meaning."""
    return f'<span class="swatch {colour_class(meaning)}"></span>'


def key(named: Iterable[tuple[str, str]]) -> str:
    """Return a key of colours, from their meanings and their texts; empty if there are none."""
    items = "".join(f"<li>{swatch(meaning)}{escape(text)}</li>" for meaning, text in named)
    return f'<ul class="keys">{items}</ul>' if items else ""


def _style_sheet() -> str:
    """All rules. Colours are variables that follow the preference of the reader's system; on paper
    they are those of light pages."""
    light, dark = _variables(LIGHT), _variables(DARK)
    schemes = (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    )
    colours = "".join(
        f".{name}{{fill:var(--{name});background:var(--{name})}}.on.{name}{{fill:var(--on-{name})}}"
        f".chart .{name}.layer{{fill:var(--{name})}}.chart .s-{name}{{stroke:var(--{name})}}"
        f".chart .band.s-{name}{{fill:var(--{name})}}"
        for name in map(colour_class, LIGHT.of)
    )
    return f"{schemes}{_RULES}{colours}"


def _variables(theme: Theme) -> str:
    names = ("page", "card", "ink", "quiet", "line", "track", "good", "bad")
    named = {name: getattr(theme, name) for name in names}
    for meaning, colour in theme.of.items():
        name = colour_class(meaning)
        named |= {name: colour, f"on-{name}": ink_on(colour)}
    return "".join(f"--{name}:{value};" for name, value in named.items())
