"""The pictures of docs/placement.md, as SVG in light and dark.

python -m tests.docs.figures      # writes them anew
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "figures"
WIDTH, MARGIN, GAP = 580, 14, 30  # pixels
ASKED, TOLD = 236, 264  # widths of the boxes
LINE, PADDING = 18, 11

STYLE = """
  text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1c2733; }
  .code { font: 12.5px ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace; }
  .page { fill: #ffffff; } .ask { fill: #e8f0fb; stroke: #3d6fb4; }
  .tell { fill: #eef6ee; stroke: #4a8c54; } .way { stroke: #5b6875; fill: none; }
  .tip { fill: #5b6875; } .word { fill: #5b6875; font-size: 13px; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6ebf1; } .page { fill: #161b22; } .ask { fill: #1b2b42; stroke: #6f9fe0; }
    .tell { fill: #1a2f20; stroke: #74b97f; } .way { stroke: #9aa7b5; }
    .tip, .word { fill: #9aa7b5; }
  }
"""


@dataclass(frozen=True)
class Row:
    """A question, and what to do if its answer is yes. Lines that begin with ` are code."""

    asked: Sequence[str]
    told: Sequence[str]
    yes: str = "yes"
    no: str = "no"

    @property
    def height(self) -> int:
        return max(len(self.asked), len(self.told)) * LINE + 2 * PADDING


STATES = (
    Row(
        ("Do states and activations", "fit in GPU memory?", "(No GPU: begin below.)"),
        (
            "`placement: {parameters: device,",
            "`  gradients: device,",
            "`  optimizer: device}",
            "or plain PyTorch",
        ),
    ),
    Row(
        ("Do all states fit in GPU", "memory and RAM together?"),
        ("`placement: auto", "and budgets for both;", "nothing goes to disk"),
    ),
    Row(
        ("Do parameters and", "gradients fit there?", "(4 bytes each in bf16,", "8 in fp32)"),
        (
            "`placement:",
            "`  {parameters: host,",
            "`   gradients: host,",
            "`   optimizer: nvme}",
            "or {host: 40%, nvme: 60%}",
        ),
    ),
    Row(
        ("Does the largest block fit", "in RAM three times?"),
        ("`placement: {parameters: nvme,", "`  gradients: nvme,", "`  optimizer: nvme}"),
        no="no: more RAM, or several ranks",
    ),
)
WORK = (
    Row(
        ("Does what forward keeps", "fit beside the states?"),
        ("nothing to do",),
    ),
    Row(
        ("Does it fit when blocks", "are computed again in", "backward?"),
        ("`activations: {checkpoint: true}", "a third more compute"),
    ),
    Row(
        ("Is the batch larger", "than one sequence?"),
        ("`micro_batches: N", "beside it, or smaller batches,", "accumulated"),
    ),
    Row(
        ("Is there a fast disk?",),
        ("`activations: {tier: nvme,", "`              checkpoint: true}"),
        no="no: a shorter sequence",
    ),
)


def svg(title: str, rows: Sequence[Row]) -> str:
    height = sum(row.height for row in rows) + GAP * len(rows) + 2 * MARGIN
    body = "\n".join(_rows(rows))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>\n{body}\n</svg>\n'
    )


def _rows(rows: Sequence[Row]) -> Iterator[str]:
    top, right = MARGIN, WIDTH - MARGIN - TOLD
    for row in rows:
        middle, bottom = top + row.height / 2, top + row.height
        yield from _box("ask", MARGIN, top, ASKED, row.height, row.asked)
        yield from _box("tell", right, top, TOLD, row.height, row.told)
        yield _arrow(MARGIN + ASKED, middle, right, middle)
        yield _word((MARGIN + ASKED + right) / 2 - 2, middle - 6, row.yes, "middle")
        x = MARGIN + ASKED / 2
        yield _arrow(x, bottom, x, bottom + GAP)
        yield _word(x + 8, bottom + GAP / 2 + 5, row.no, "start")
        top = bottom + GAP


def _box(
    kind: str, x: float, y: float, width: float, height: float, lines: Sequence[str]
) -> Iterator[str]:
    yield f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
    first = y + height / 2 - len(lines) * LINE / 2 + 13
    for number, line in enumerate(lines):
        code = ' class="code" xml:space="preserve"' if line.startswith("`") else ""
        text = escape(line.removeprefix("`"))
        yield f'<text{code} x="{x + PADDING}" y="{first + number * LINE:g}">{text}</text>'


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    tip = f"{to_x},{to_y:g} {to_x - 7},{to_y - 4:g} {to_x - 7},{to_y + 4:g}"
    if x == to_x:
        tip = f"{to_x:g},{to_y:g} {to_x - 4:g},{to_y - 7:g} {to_x + 4:g},{to_y - 7:g}"
    return (
        f'<path class="way" d="M{x:g} {y:g} L{to_x:g} {to_y:g}"/>'
        f'<polygon class="tip" points="{tip}"/>'
    )


def _word(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="word" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def pictures() -> dict[str, str]:
    """By file name."""
    return {
        "states.svg": svg("Where the states go", STATES),
        "activations.svg": svg("What to do about activations", WORK),
    }


if __name__ == "__main__":
    for name, text in pictures().items():
        (FOLDER / name).write_text(text)
