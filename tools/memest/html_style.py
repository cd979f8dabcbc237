"""The style sheet of the HTML page, light and dark."""

from __future__ import annotations

from offload.planning.plan.estimate import MemoryClass
from offload.tools.memest.colours import DARK, LIGHT, Theme, ink_on

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
footer{margin-top:26px;font-size:13px;color:var(--quiet)}
"""


def style_sheet() -> str:
    """All rules; colours are variables that follow what the reader's system prefers."""
    dark = f"@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"
    scheme = ":root{color-scheme:light dark;" + _variables(LIGHT) + "}"
    classes = "".join(f".c-{n}{{fill:var(--{n});background:var(--{n})}}" for n in MemoryClass)
    inks = "".join(f".i-{name}{{fill:var(--on-{name})}}" for name in MemoryClass)
    count = len(LIGHT.spans)
    spans = "".join(f".s-{i}{{fill:var(--s{i});background:var(--s{i})}}" for i in range(count))
    span_inks = "".join(f".t-{i}{{fill:var(--on-s{i})}}" for i in range(count))
    return f"{scheme}{dark}{_RULES}{classes}{inks}{spans}{span_inks}"


def _variables(theme: Theme) -> str:
    named = {
        name: getattr(theme, name)
        for name in ("page", "card", "ink", "quiet", "line", "track", "good", "bad")
    }
    for memory_class in MemoryClass:
        colour = theme.of_class(memory_class)
        named |= {memory_class: colour, f"on-{memory_class}": ink_on(colour)}
    for index, colour in enumerate(theme.spans):
        named |= {f"s{index}": colour, f"on-s{index}": ink_on(colour)}
    return "".join(f"--{name}:{value};" for name, value in named.items())
