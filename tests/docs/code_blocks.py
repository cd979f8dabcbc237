"""The code blocks of README.md and docs/*.md, and what a comment before a block says of it.

    <!-- not run: needs a GPU -->       parsed alone; the reason is listed with the skipped tests
    <!-- needs: peft, trl -->           run where these can be imported
    <!-- slow -->                       run with --long
    <!-- setup
    model = ...                         Python that runs before the block and is not shown
    -->

Every block names its language: python, yaml, json, console, or text for what is none of them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = ("python", "yaml", "json", "console", "text")

_FENCE = re.compile(r"( *)(`{3,})(\w*)")
_COMMENT = re.compile(r"<!-- *(not run|needs|slow|setup):?(.*?)-->", re.S)


class BlockError(Exception):
    """A block or comment that cannot be read; PAGE:LINE and what."""


@dataclass
class Said:
    """What the comments before a block say."""

    not_run: str = ""
    needs: tuple[str, ...] = ()
    slow: bool = False
    setup: str = ""
    setup_line: int = 0


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of its first line of code, from 1
    language: str
    text: str
    said: Said = field(default_factory=Said)

    @property
    def place(self) -> str:
        """`docs/loop.md:7`."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def why_not(self, *, long: bool) -> str:
        """Why it is not run here; empty if it is."""
        missing = [name for name in self.said.needs if find_spec(name) is None]
        if missing:
            return f"needs {', '.join(missing)}"
        return self.said.not_run or ("slow: with --long" if self.said.slow and not long else "")


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks in their order. BlockError for one that does not end, or names no language."""
    lines = page.read_text().split("\n")
    number, said = 0, Said()
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if lines[number].startswith("<!--"):
            end = _find(lines, number, lambda line: line.rstrip().endswith("-->"), page)
            _note(said, "\n".join(lines[number : end + 1]), number + 1, page)
            number = end + 1
        elif fence:
            indent, ticks, language = fence.groups()
            end = _find(lines, number + 1, lambda line: line.strip() == ticks, page)  # noqa: B023
            code = "\n".join(line.removeprefix(indent) for line in lines[number + 1 : end])
            block = Block(page, number + 2, language, code + "\n", said)
            if language not in LANGUAGES:
                raise BlockError(f"{block.place}: a block in {language or 'no language'!r}")
            yield block
            number, said = end + 1, Said()
        else:
            if lines[number].strip():
                said = Said()
            number += 1


def _find(lines: list[str], first: int, ends: object, page: Path) -> int:
    for number in range(first, len(lines)):
        if ends(lines[number]):  # type: ignore[operator]
            return number
    raise BlockError(f"{page.relative_to(ROOT)}:{first + 1}: does not end")


def _note(said: Said, comment: str, line: int, page: Path) -> None:
    match = _COMMENT.fullmatch(comment.rstrip())
    if match is None:
        return  # for readers of the source, or another tool
    word, text = match[1], match[2]
    if word == "setup":
        said.setup, said.setup_line = text.lstrip(" "), line
    elif word == "slow":
        said.slow = True
    elif not text.strip():
        raise BlockError(f"{page.relative_to(ROOT)}:{line}: {word}: why, or what?")
    elif word == "needs":
        said.needs = tuple(name.strip() for name in text.split(","))
    else:
        said.not_run = text.strip()


def at_line(code: str, line: int) -> str:
    """With as many empty lines in front as the page has: errors name the page's line."""
    return "\n" * (line - 1) + code
