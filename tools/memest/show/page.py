"""An HTML page: one file, no scripts, nothing fetched, light or dark as the reader's system."""

from collections.abc import Sequence
from dataclasses import dataclass

from offload.display.plain_text import without_controls


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table. `code` comes before the text, each on a line of its own; `state` is good,
    bad or empty."""

    text: str
    code: Sequence[str] = ()
    state: str = ""
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """A key figure: a name, a value, and a remark below it."""

    name: str
    value: str
    aside: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table; columns contain numbers except those in `left`."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    left: frozenset[int] = frozenset({0})


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page; what is empty is not shown, nor is a section with nothing in it."""

    title: str
    tables: Sequence[Table] = ()
    lines: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A page, verdict and key figures first. `state` is that of the verdict: good, bad or empty."""

    name: str  # of the browser's window
    title: str
    about: Sequence[str]
    verdict: str
    state: str
    figures: Sequence[Figure]
    sections: Sequence[Section]


def to_html(page: Page) -> str:
    """Return the file of a page. Texts are escaped by the template; control characters are shown as
    Python escapes."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("offload.tools.memest", "show"), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["cell"] = lambda cell: Cell(cell) if isinstance(cell, str) else cell
    template = environment.get_template("page.html")
    return without_controls(template.render(page=page))
