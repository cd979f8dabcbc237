"""docs/loops.md, made of the rows and what came of them.

python -m tests.offload.loop_page      # writes it anew
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.offload.loop_rows import ROWS
from tests.offload.loop_trial import PLAIN, Row, result

PAGE = Path(__file__).parents[2] / "docs" / "loops.md"
HEAD = """# Loops as people write them

The result of each training loop, or part of one, when its model trains through an engine. Each row
is run by plain PyTorch and by two engines: one keeps all states in host memory, the other on nvme
with too little memory for all of them. *As plain PyTorch* means: losses, all else that the loop
logs, and all weights are within 1e-6 of plain PyTorch's in fp32, with the same bits on host and
nvme. Where a loop is refused, the error says what to do instead; no loop trains wrongly in silence.

The loops are in `tests/offload/loop_rows.py`. The tests run them and compare this page with
their results; `python -m tests.offload.loop_page` writes it again.
"""


def line(row: Row, outcome: str) -> str:
    return f"| {row.text.replace('|', chr(92) + '|')} | {outcome} |"


def page(lines: dict[str, str]) -> Iterator[str]:
    """The page's lines, given each row's by name."""
    yield from HEAD.splitlines()
    for section in dict.fromkeys(row.section for row in ROWS):
        yield from ("", f"## {section}", "| loop | result |", "|---|---|")
        yield from (lines[row.name] for row in ROWS if row.section == section)


def main() -> None:
    lines = {row.name: line(row, result(row)) for row in ROWS}
    PAGE.write_text("\n".join(page(lines)) + "\n")
    right = sum(PLAIN in each for each in lines.values())
    print(f"{PAGE}: {len(ROWS)} rows, {right} as plain PyTorch, the others refused")


if __name__ == "__main__":
    main()
