"""The rows of docs/libraries.md: each is a test of one library's trainer with one kind of model.

    @row("trl", "SFTTrainer", "Llama, LoRA")
    def test_name(placement: str, tmp_path: Path) -> None: ...

runs once for each placement, and fails unless the run through an engine equals the plain one. A
combination that is refused is given its error's class and remedy: `refused="StateError: ..."`.

python -m tests.libraries.rows         # writes the page anew
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.offload.engine_cases import HOST, NVME

PLACEMENTS = {"host": HOST, "nvme": NVME}
PAGE = Path(__file__).parents[2] / "docs" / "libraries.md"
HEAD = """# Libraries, row by row

What people train with, and the result with an engine. Each row is a test that runs the loop as the
library's users write it, with a tiny model, in plain PyTorch and through an engine, once with all
states in host memory and once on nvme. *As plain PyTorch* means: in fp32, losses and weights differ
from plain PyTorch's by 3e-6 at most; images of pipelines have equal bits. Where a combination is
refused, the error says what to do instead.

`make test-libraries` installs the libraries and runs the tests, which are in `tests/libraries/`;
`python -m tests.libraries.rows` writes this page.

| library | trainer or loop | model | result |
|---|---|---|---|
"""


class Row(NamedTuple):
    """One line of the table."""

    library: str
    trainer: str
    model: str
    refused: str = ""  # the error and its remedy


def row(library: str, trainer: str, model: str, *, refused: str = "") -> Callable[[Any], Any]:
    """Mark a test as the proof of a row. It takes `placement`, a key of `PLACEMENTS`."""
    assert all((library, trainer, model)), "a row names all three"
    return pytest.mark.parametrize("placement", ["host"] if refused else list(PLACEMENTS))


def rows() -> Iterator[Row]:
    """Yield the rows of all tests, read from their sources: most libraries may be missing here."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "row":
                texts = [ast.literal_eval(each) for each in node.args]
                yield Row(*texts, **{str(k.arg): ast.literal_eval(k.value) for k in node.keywords})


def page() -> str:
    """The page's text."""
    lines = [
        f"| {each.library} | {each.trainer} | {each.model} | {each.refused or 'as plain PyTorch'} |"
        for each in sorted(rows())
    ]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
